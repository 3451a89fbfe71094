//! The transformation of documents.

use super::{characters::Characters, decisions::Decisions, sentinels::Sentinels};
use crate::{error::DataError, tokenizer::Tokenizer};

/// How documents are transformed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Transform {
    pub(super) sentinels: Sentinels,
    /// The probability that a document is transformed.
    pub(super) rate: f64,
    /// The probability that a transformed document has the suffix first.
    pub(super) spm_rate: f64,
    /// The token between the fragments of a document.
    pub(super) split_token: Option<u32>,
    /// The probability that a fragment of a transformed document is transformed.
    pub(super) fragment_rate: f64,
    /// Texts that start with this are not transformed.
    pub(super) no_prefix: Option<String>,
}

impl Transform {
    /// Transforms each document of `tokens`, which end with the tokenizer's eos. Megatron-LM drops
    /// the eos of a document without other tokens; here it is kept.
    ///
    /// # Errors
    /// The tokenizer cannot encode a part of a text.
    pub(super) fn documents(
        &self,
        tokens: &[u32],
        tokenizer: &dyn Tokenizer,
        decisions: &mut dyn Decisions,
    ) -> Result<Vec<u32>, DataError> {
        let eos = tokenizer.eos();
        each_between(tokens, eos, |document| {
            let Some(split_token) = self.split_token.filter(|token| document.contains(token))
            else {
                return self.permute(document, self.rate, tokenizer, decisions);
            };
            if !decisions.happens(self.rate) {
                return Ok(document.to_vec());
            }
            each_between(document, split_token, |fragment| {
                self.permute(fragment, self.fragment_rate, tokenizer, decisions)
            })
        })
    }

    /// With probability `rate`, divides the text at two characters and puts the middle last:
    /// prefix, suffix, middle (PSM), or suffix, prefix, middle (SPM, variant 2 of the paper). The
    /// text stays as it is if its parts cannot be encoded without a change.
    ///
    /// Source: `_permute` of `fim_dataset.py`.
    fn permute(
        &self,
        tokens: &[u32],
        rate: f64,
        tokenizer: &dyn Tokenizer,
        decisions: &mut dyn Decisions,
    ) -> Result<Vec<u32>, DataError> {
        let unchanged = || Ok(tokens.to_vec());
        if !decisions.happens(rate) {
            return unchanged();
        }
        let characters = Characters::of(tokens, tokenizer)?;
        let is_excluded = |start: &String| characters.starts_with(start);
        if !characters.has_text() || self.no_prefix.as_ref().is_some_and(is_excluded) {
            return unchanged();
        }
        let [first, second] = decisions.boundaries(characters.len());
        let is_spm = decisions.happens(self.spm_rate);
        let [before, suffix] = characters.split_at(second);
        let [prefix, middle] = before.split_at(first);
        let divided = !is_spm || prefix.joins(&middle, tokenizer)?;
        let parts = if divided {
            [prefix, middle, suffix]
        } else {
            [prefix.followed_by(middle), Characters::default(), suffix]
        };
        let [prefix, middle, suffix] = parts.map(|part| part.encode(tokenizer));
        let (Some(prefix), Some(middle), Some(suffix)) = (prefix?, middle?, suffix?) else {
            return unchanged();
        };
        let of = self.sentinels;
        Ok(if is_spm {
            let start = vec![of.prefix, of.suffix];
            [start, suffix, vec![of.middle], prefix, middle].concat()
        } else {
            let [start, then] = [vec![of.prefix], vec![of.suffix]];
            [start, prefix, then, suffix, vec![of.middle], middle].concat()
        })
    }
}

/// Applies `change` to the tokens between each two that equal `separator`, if there are any.
fn each_between(
    tokens: &[u32],
    separator: u32,
    mut change: impl FnMut(&[u32]) -> Result<Vec<u32>, DataError>,
) -> Result<Vec<u32>, DataError> {
    let mut changed = Vec::with_capacity(tokens.len() + 3);
    for (number, part) in tokens.split(|token| *token == separator).enumerate() {
        if number > 0 {
            changed.push(separator);
        }
        if !part.is_empty() {
            changed.extend(change(part)?);
        }
    }
    Ok(changed)
}

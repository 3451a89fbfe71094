use std::sync::Arc;

use super::{samples::FimSamples, sentinels::Sentinels, transform::Transform};
use crate::{error::DataError, samples::Samples, tokenizer::Tokenizer};

/// A text as it occurs in code. A tokenizer that changes it cannot be used.
const PROBE: &str = "if a  > B_1:\n\n\treturn [\"x\"] \n";

/// Transforms documents for fill-in-the-middle.
///
/// With probability `rate`, the text of a document is divided at two random characters into prefix,
/// middle and suffix, each of which is encoded anew and marked by a token before it. The middle is
/// put last: prefix, suffix, middle (PSM) or, with probability `spm_rate`, suffix, prefix, middle
/// (SPM, variant 2 of the paper). So each token is still predicted from those before it.
///
/// ```
/// use std::sync::Arc;
/// use megaburn_data::{
///     Corpus, FimConfig, Sampler, Samples, TokenDataset, Tokenizer, TokenizerTrainer,
/// };
///
/// let corpus = Corpus::from_documents("code", vec!["fn one() -> u8 { 1 }\n".repeat(20)])?;
/// let special = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"].map(String::from);
/// let trained = TokenizerTrainer::new(280).with_special_tokens(special).train(&corpus)?;
/// let tokenizer: Arc<dyn Tokenizer> = Arc::new(trained.into_tokenizer());
///
/// let set = TokenDataset::new(&corpus, tokenizer.as_ref())?;
/// let samples = Arc::new(Sampler::shuffled(set, 32, 1)?);
/// let fim = FimConfig::new(1.0).with_spm_rate(0.0).build(samples, tokenizer.clone(), 32, 1)?;
/// let tokens = fim.tokens(0)?;
/// assert_eq!(tokens.len(), 33);
/// assert_eq!(Some(tokens[0]), tokenizer.token_to_id("<fim_prefix>"));
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct FimConfig {
    /// The probability that a document is transformed, from 0 to 1.
    pub rate: f64,
    /// The probability that a transformed document has the suffix first. Default: 0.5.
    pub spm_rate: f64,
    /// The token between the fragments of a document, such as the files of a repository. Each
    /// fragment of a transformed document is transformed by itself. Default: none.
    pub split_sample: Option<String>,
    /// The probability that a fragment of a transformed document is transformed. Default: `rate`.
    pub fragment_rate: Option<f64>,
    /// Documents and fragments whose text starts with this are not transformed. Default: none.
    pub no_prefix: Option<String>,
    /// The token before the prefix. Default: that of a published tokenizer, and so for the middle
    /// and the suffix.
    pub prefix: Option<String>,
    /// The token before the middle.
    pub middle: Option<String>,
    /// The token before the suffix.
    pub suffix: Option<String>,
}

impl FimConfig {
    /// Transforms documents with this probability, half of them with the suffix first.
    pub fn new(rate: f64) -> Self {
        Self {
            rate,
            spm_rate: 0.5,
            split_sample: None,
            fragment_rate: None,
            no_prefix: None,
            prefix: None,
            middle: None,
            suffix: None,
        }
    }

    /// Sets the probability that a transformed document has the suffix first.
    pub fn with_spm_rate(self, spm_rate: f64) -> Self {
        Self { spm_rate, ..self }
    }

    /// Sets the token between the fragments of a document.
    pub fn with_split_sample(self, token: impl Into<String>) -> Self {
        let split_sample = Some(token.into());
        Self {
            split_sample,
            ..self
        }
    }

    /// Sets the probability that a fragment of a transformed document is transformed.
    pub fn with_fragment_rate(self, rate: f64) -> Self {
        let fragment_rate = Some(rate);
        Self {
            fragment_rate,
            ..self
        }
    }

    /// Leaves documents and fragments that start with this text as they are.
    pub fn with_no_prefix(self, start: impl Into<String>) -> Self {
        let no_prefix = Some(start.into());
        Self { no_prefix, ..self }
    }

    /// Sets the tokens before prefix, middle and suffix, spelled as in the vocabulary.
    pub fn with_tokens(
        self,
        prefix: impl Into<String>,
        middle: impl Into<String>,
        suffix: impl Into<String>,
    ) -> Self {
        Self {
            prefix: Some(prefix.into()),
            middle: Some(middle.into()),
            suffix: Some(suffix.into()),
            ..self
        }
    }

    /// The transformed `samples`, which have up to `seq_len` inputs each. Which documents are
    /// transformed and where they are divided depends on `seed` and the index of the sample only.
    ///
    /// # Errors
    /// A rate is outside of 0 to 1; the tokenizer lacks a token, or changes texts; a token has two
    /// roles.
    pub fn build(
        &self,
        samples: Arc<dyn Samples>,
        tokenizer: Arc<dyn Tokenizer>,
        seq_len: usize,
        seed: u64,
    ) -> Result<FimSamples, DataError> {
        let transform = self.transform(tokenizer.as_ref())?;
        Ok(FimSamples::new(
            samples, tokenizer, transform, seq_len, seed,
        ))
    }

    pub(super) fn transform(&self, tokenizer: &dyn Tokenizer) -> Result<Transform, DataError> {
        let failed = |why| Err(DataError::Fim { why });
        let fragment_rate = self.fragment_rate.unwrap_or(self.rate);
        for (name, rate) in [
            ("rate", self.rate),
            ("spm_rate", self.spm_rate),
            ("fragment_rate", fragment_rate),
        ] {
            if !(0.0..=1.0).contains(&rate) {
                return failed(format!("{name} is {rate}; give a probability, from 0 to 1"));
            }
        }
        if self.fragment_rate.is_some() && self.split_sample.is_none() {
            return failed(
                "fragment_rate needs fragments; set split_sample to the token between them".into(),
            );
        }
        let given = [&self.prefix, &self.middle, &self.suffix].map(Option::as_deref);
        let sentinels = Sentinels::find(tokenizer, given)?;
        let split_token = match &self.split_sample {
            None => None,
            Some(token) => match tokenizer.token_to_id(token) {
                None => {
                    return failed(format!(
                        "the tokenizer has no token `{token}`; set split_sample to one of its \
                        vocabulary"
                    ));
                }
                id => id,
            },
        };
        let mut roles = vec![
            ("prefix", sentinels.prefix),
            ("middle", sentinels.middle),
            ("suffix", sentinels.suffix),
            ("the end of documents", tokenizer.eos()),
        ];
        roles.extend(split_token.map(|id| ("split_sample", id)));
        check_different(&roles)?;
        check_gives_back(tokenizer)?;
        Ok(Transform {
            sentinels,
            rate: self.rate,
            spm_rate: self.spm_rate,
            split_token,
            fragment_rate,
            no_prefix: self.no_prefix.clone(),
        })
    }
}

/// Checks that no token has two roles.
fn check_different(roles: &[(&str, u32)]) -> Result<(), DataError> {
    for (at, (role, id)) in roles.iter().enumerate() {
        if let Some((other, _)) = roles[..at].iter().find(|(_, other)| other == id) {
            let why = format!("{other} and {role} are the same token, {id}; name different ones");
            return Err(DataError::Fim { why });
        }
    }
    Ok(())
}

/// Checks that code which is divided anywhere survives encoding and decoding.
fn check_gives_back(tokenizer: &dyn Tokenizer) -> Result<(), DataError> {
    let parts = (0..=PROBE.len()).flat_map(|at| <[&str; 2]>::from(PROBE.split_at(at)));
    for part in parts {
        let back = tokenizer.decode(&tokenizer.encode(part)?);
        if back != part {
            let why = format!(
                "the tokenizer changes texts: {part:?} comes back as {back:?}; use a tokenizer that \
                keeps every character, such as a byte-level BPE"
            );
            return Err(DataError::Fim { why });
        }
    }
    Ok(())
}

//! What a vocabulary says about its tokens.

use crate::{error::DataError, tokenizer::Tokenizer};

/// The beginning of a piece that continues a word.
const CONTINUES: &str = "##";

/// The tokens of a vocabulary, by id.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    /// Whether the token continues a word; `None` for an id without a token.
    continues: Vec<Option<bool>>,
    /// The ids that have a token, in ascending order.
    ids: Vec<u32>,
}

impl Pieces {
    /// # Errors
    /// The tokenizer does not know how its tokens are spelled.
    pub(super) fn new(tokenizer: &dyn Tokenizer) -> Result<Self, DataError> {
        let ids = (0u32..).take(tokenizer.vocab_size());
        let continues = ids.map(|id| {
            let token = tokenizer.id_to_token(id)?;
            Some(token.starts_with(CONTINUES))
        });
        let continues: Vec<_> = continues.collect();
        let ids = (0u32..).zip(&continues).filter(|(_, of)| of.is_some());
        let ids: Vec<_> = ids.map(|(id, _)| id).collect();
        if ids.is_empty() {
            let why = "the tokenizer has no tokens with spellings, which say where words begin; use \
                a tokenizer.json or BERT's vocab.txt (data.tokenizer)";
            return Err(DataError::MaskedSamples { why: why.into() });
        }
        Ok(Self { continues, ids })
    }

    /// Whether a token continues a word; `None` if there is no such token.
    pub(super) fn continues(&self, id: u32) -> Option<bool> {
        self.continues.get(id as usize).copied().flatten()
    }

    /// The ids that have a token, in ascending order.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The highest id plus one.
    pub(super) fn vocab_size(&self) -> usize {
        self.continues.len()
    }
}

/// The id of a special token.
///
/// # Errors
/// The tokenizer does not have it; `role` says what it is for.
pub(super) fn special(
    tokenizer: &dyn Tokenizer,
    spelling: &str,
    role: &str,
) -> Result<u32, DataError> {
    tokenizer
        .token_to_id(spelling)
        .ok_or_else(|| DataError::MaskedSamples {
            why: format!(
                "the tokenizer has no token `{spelling}`, which {role}; name the one of its \
                vocabulary, or use a tokenizer that has it (data.tokenizer)"
            ),
        })
}

/// The id of the token that pads samples, which is -1 if a token with another meaning has it: a
/// token of the text is then never taken for padding.
///
/// Source: `MegatronDataset.__init__` of `megatron_dataset.py`.
pub(super) fn padding(tokenizer: &dyn Tokenizer, others: &[Option<u32>]) -> i64 {
    match tokenizer.pad() {
        Some(pad) if pad != tokenizer.eos() && !others.contains(&Some(pad)) => i64::from(pad),
        _ => -1,
    }
}

//! Encodes texts piece by piece with a tokenizer of a published model.

use super::{PieceEncoder, hf::HfTokenizer, text_encoder::TextEncoder, words::PieceEnds};
use crate::error::DataError;

#[derive(Debug)]
pub(super) struct HfPieces<'t> {
    tokenizer: &'t HfTokenizer,
    ends: PieceEnds<'t>,
    /// The special tokens before and after a prompt; `None` for training text.
    template: Option<&'t [Vec<u32>; 2]>,
}

impl<'t> HfPieces<'t> {
    /// `None` if no place is proven where a text can be cut.
    pub(super) fn of(tokenizer: &'t HfTokenizer, are_prompts: bool) -> Option<Self> {
        let template = match are_prompts {
            true => Some(tokenizer.template().ok()?.as_ref()?),
            false => None,
        };
        Some(Self {
            ends: encoder(tokenizer, are_prompts).piece_ends()?,
            tokenizer,
            template,
        })
    }
}

fn encoder(tokenizer: &HfTokenizer, are_prompts: bool) -> &TextEncoder {
    match are_prompts {
        true => tokenizer.prompt(),
        false => tokenizer.plain(),
    }
}

impl PieceEncoder for HfPieces<'_> {
    fn end(&self, text: &str, least: usize) -> Result<Option<usize>, DataError> {
        self.tokenizer.ids(text, self.ends.find(text, least))
    }

    fn encode(&self, piece: &str, is_first: bool, is_last: bool) -> Result<Vec<u32>, DataError> {
        let encoder = encoder(self.tokenizer, self.template.is_some());
        let ids = match is_first {
            true => encoder.encode(piece),
            false => encoder.encode_continued(piece),
        };
        let mut ids = self.tokenizer.ids(piece, ids)?;
        let Some([before, after]) = self.template else {
            return Ok(self.tokenizer.without_reserved(ids));
        };
        if is_first {
            ids.splice(..0, before.iter().copied());
        }
        if is_last {
            ids.extend(after);
        }
        Ok(ids)
    }
}

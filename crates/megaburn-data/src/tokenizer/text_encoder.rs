//! Encodes texts: word by word if that is known to give the same ids, else with the library.

use std::sync::OnceLock;

use tokenizers::Result;

use super::{
    encoder::Encoder,
    words::{PieceEnds, Words},
};

/// Bytes of memory that a model needs per byte of a word; BPE was measured with 110.
const MODEL_MEMORY: usize = 120;
/// Bytes of memory that `tokenizers` needs per byte of a text; 190 were measured.
const LIBRARY_MEMORY: usize = 200;

pub(super) struct TextEncoder {
    pub(super) encoder: Encoder,
    /// `None` if it does not cut texts into words; created at its first use.
    words: OnceLock<Option<Words>>,
}

impl TextEncoder {
    pub(super) fn new(encoder: Encoder) -> Self {
        let words = OnceLock::new();
        Self { encoder, words }
    }

    fn words(&self) -> Option<&Words> {
        let words = self.words.get_or_init(|| Words::of(&self.encoder));
        words.as_ref()
    }

    /// The ids of a text without those of the template.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self.words() {
            Some(words) => words.encode(&self.encoder, text, false),
            None => Ok(self.encoder.encode_fast(text, false)?.get_ids().to_vec()),
        }
    }

    /// Finds where texts can be cut; `None` if no such place is known.
    pub(super) fn piece_ends(&self) -> Option<PieceEnds<'_>> {
        PieceEnds::of(self.words()?, &self.encoder)
    }

    /// The ids of a piece of a text, after the first one.
    pub(super) fn encode_continued(&self, piece: &str) -> Result<Vec<u32>> {
        match self.words() {
            Some(words) => words.encode(&self.encoder, piece, true),
            None => self.encode(piece),
        }
    }

    /// The ids of a text with those of the template.
    pub(super) fn encode_with_template(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encoder.encode_fast(text, true)?.get_ids().to_vec())
    }

    /// Bytes of memory that the encoding of a text needs at most, approximately.
    pub(super) fn memory(&self, num_bytes: usize, longest_word: usize) -> usize {
        match self.words() {
            Some(_) => 16 * num_bytes + MODEL_MEMORY * longest_word,
            None => LIBRARY_MEMORY * num_bytes,
        }
    }
}

//! Encodes a text of any size piece by piece.

use std::fmt::Debug;

use crate::error::DataError;

/// Encodes a text piece by piece, so that memory need not hold all of it
/// ([`Tokenizer::pieces`](super::Tokenizer::pieces)).
pub trait PieceEncoder: Debug + Send + Sync {
    /// Where a piece may end, at or after byte `least` of `text`, which begins where the piece does
    /// and which may go on. `None` if no place is found yet: then more text is to be read.
    ///
    /// # Errors
    /// A part of the text cannot be encoded.
    fn end(&self, text: &str, least: usize) -> Result<Option<usize>, DataError>;
    /// The ids of a piece. Those of all pieces, one after another, are the ids of the text.
    ///
    /// # Errors
    /// The tokenizer has no ids for a part of the piece.
    fn encode(&self, piece: &str, is_first: bool, is_last: bool) -> Result<Vec<u32>, DataError>;
}

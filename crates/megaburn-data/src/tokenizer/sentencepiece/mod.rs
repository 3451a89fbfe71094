//! SentencePiece models: the file format, and the parts that encode and decode as the original.
//!
//! Source: <https://github.com/google/sentencepiece>, `src/sentencepiece_model.proto`,
//! `src/normalizer.cc`, `src/unigram_model.cc`, `src/sentencepiece_processor.cc`.

mod charsmap;
mod decoder;
mod normalizer;
mod proto;
mod unigram;
mod wire;

pub(super) use decoder::PieceDecoder;
pub(super) use normalizer::{PieceNormalizer, user_defined};
pub(super) use proto::{Kind, ModelType, SentencePieceModel};
pub(super) use unigram::Unigram;

/// The character that stands for a space in the spelling of a token.
pub(super) const SPACE: char = '\u{2581}';

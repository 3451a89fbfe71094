//! Text to tokens and back.

mod byte;
mod hf;
mod pieces;
mod special;
mod stream;
mod train;

use std::fmt::Debug;

use crate::DataError;

pub use byte::ByteTokenizer;
pub use hf::HfTokenizer;
pub use train::{BOS, EOS, PAD, TokenizerTrainer, TrainedTokenizer};

/// Text to token ids and back. Object-safe, so that a run chooses its tokenizer by configuration.
pub trait Tokenizer: Debug + Send + Sync {
    /// Number of ids: the highest plus one. Every id is below it.
    fn vocab_size(&self) -> usize;
    /// The ids of a text that is learnt from, without special tokens: where one is spelled out in
    /// `text`, it is text like any other, so that no document can forge the end of another.
    ///
    /// # Errors
    /// The tokenizer has no ids for a part of the text.
    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError>;
    /// The ids of each of `texts`, as [`encode`](Self::encode) gives them, however many threads
    /// share the work.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        texts.iter().map(|text| self.encode(text)).collect()
    }
    /// The ids of what a model is asked with: special tokens that are spelled out in `text` are
    /// recognised, and those that the tokenizer's template puts around a text (Llama's bos) are
    /// added, as `transformers` does.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode(text)
    }
    /// The text of `tokens`. Special tokens give nothing; bytes that are not text give U+FFFD.
    fn decode(&self, tokens: &[u32]) -> String;
    /// Decodes a text token by token while it is generated.
    fn stream(&self) -> Box<dyn TextStream + '_>;
    /// The token between two documents, with which a generated text ends.
    fn eos(&self) -> u32;
    /// The token a text starts with, where the tokenizer has one.
    fn bos(&self) -> Option<u32>;
    /// The token that fills short samples, where the tokenizer has one.
    fn pad(&self) -> Option<u32>;
    /// Whether a token of text is exactly one byte, so that the loss per token is the loss per byte.
    fn is_byte_level(&self) -> bool {
        false
    }
    /// Differs between tokenizers that turn the same documents into other tokens; 0 for the
    /// byte-level one.
    fn hash(&self) -> u64;
}

/// A text that arrives token by token.
///
/// What [`push`](Self::push) and [`finish`](Self::finish) return, joined, equals
/// [`Tokenizer::decode`] of all tokens, and no part ends inside a character.
pub trait TextStream: Debug {
    /// The text that is certain once `token` has come; empty inside a character.
    fn push(&mut self, token: u32) -> String;
    /// What was held back because a further token could have changed it: nothing, or what was left
    /// of a character that never became whole.
    fn finish(&mut self) -> String;
}

/// A loss in bits per byte of text from one in nats per token.
///
/// `bytes_per_token` is that of the text ([`TokenDataset::bytes_per_token`]).
///
/// [`TokenDataset::bytes_per_token`]: crate::TokenDataset::bytes_per_token
pub fn bits_per_byte(nats_per_token: f64, bytes_per_token: f64) -> f64 {
    nats_per_token / std::f64::consts::LN_2 / bytes_per_token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_per_byte_of_a_uniform_guess_over_bytes_is_eight() {
        assert!((bits_per_byte(256f64.ln(), 1.0) - 8.0).abs() < 1e-12);
        assert!((bits_per_byte(256f64.ln(), 4.0) - 2.0).abs() < 1e-12);
    }
}

//! Converts text to tokens and back.

mod beside;
mod byte;
mod classes;
mod encoder;
mod files;
mod hf;
mod hf_encoding;
mod hf_pieces;
mod merges;
mod piece_encoder;
mod pieces;
mod published;
mod sentencepiece;
mod special;
mod stream;
mod t5;
mod text_encoder;
mod train;
mod transformers;
mod trie;
mod unknown;
mod vocabulary;
mod words;

use std::fmt::Debug;

use crate::error::DataError;

pub use byte::ByteTokenizer;
pub use hf::HfTokenizer;
pub use piece_encoder::PieceEncoder;
pub use published::PublishedTokenizer;
pub use train::{BOS, EOS, PAD, TokenizerTrainer, TrainedTokenizer};

/// Converts text to token ids and back. It is object-safe, so the configuration can select the
/// tokenizer.
pub trait Tokenizer: Debug + Send + Sync {
    /// Number of ids: the highest id plus one.
    fn vocab_size(&self) -> usize;
    /// The ids of a training text. Special tokens that are spelled out in `text` are encoded as
    /// plain text, so that no document can forge the end of another.
    ///
    /// # Errors
    /// The tokenizer has no ids for a part of the text.
    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError>;
    /// The ids of each of `texts`, equal to those of [`encode`](Self::encode) for any number of
    /// threads.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        texts.iter().map(|text| self.encode(text)).collect()
    }
    /// The ids of a prompt. As in `transformers`, special tokens that are spelled out in `text` are
    /// recognised, and the special tokens of the tokenizer's template (such as Llama's bos) are
    /// added.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode(text)
    }
    /// As [`encode_prompt`](Self::encode_prompt), without the special tokens of the template.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn encode_bare_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode(text)
    }
    /// Checks that [`encode_prompt`](Self::encode_prompt) gives the ids of the original, as far as
    /// the files of the tokenizer say. The original of a `tokenizer.json` is `transformers`; those
    /// of other files are SentencePiece, tiktoken and BERT, whose ids are always given.
    ///
    /// # Errors
    /// They name a class, tokens or switches that change what `tokenizer.json` says.
    fn check_prompts(&self) -> Result<(), DataError> {
        Ok(())
    }
    /// The ids of each of `texts`, equal to those of [`encode_prompt`](Self::encode_prompt) for any
    /// number of threads.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn encode_prompts(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        texts.iter().map(|text| self.encode_prompt(text)).collect()
    }
    /// Encodes texts piece by piece, as training text or as prompts, if it is proven where a text can
    /// be cut. `None` if it is not: then each text is encoded as a whole.
    fn pieces(&self, _are_prompts: bool) -> Option<Box<dyn PieceEncoder + '_>> {
        None
    }
    /// Bytes of memory that the encoding of a text needs at most, approximately. The text has
    /// `num_bytes` bytes, and its longest word, or run of spaces, `_longest_word`.
    fn encoding_memory(&self, num_bytes: usize, _longest_word: usize) -> usize {
        16 * num_bytes
    }
    /// The text of `tokens`. Special tokens are dropped; bytes that are not UTF-8 become U+FFFD.
    fn decode(&self, tokens: &[u32]) -> String;
    /// A decoder for generated text that receives one token at a time.
    fn stream(&self) -> Box<dyn TextStream + '_>;
    /// The token that separates documents and ends a generated text.
    fn eos(&self) -> u32;
    /// The token that starts a text, if the tokenizer has one.
    fn bos(&self) -> Option<u32>;
    /// The token that pads short samples, if the tokenizer has one.
    fn pad(&self) -> Option<u32>;
    /// The id of a token, spelled as in the vocabulary; `None` if there is no such token.
    fn token_to_id(&self, _token: &str) -> Option<u32> {
        None
    }
    /// The spelling of a token in the vocabulary; `None` if there is no such id, or if spellings
    /// are not known.
    fn id_to_token(&self, _id: u32) -> Option<String> {
        None
    }
    /// Whether a token is special: [`decode`](Self::decode) gives no text for it, and
    /// [`encode`](Self::encode) never returns it.
    fn is_special(&self, id: u32) -> bool {
        id == self.eos() || Some(id) == self.bos() || Some(id) == self.pad()
    }
    /// Whether each token of text is exactly one byte, so that the loss per token is the loss per
    /// byte.
    fn is_byte_level(&self) -> bool {
        false
    }
    /// How the tokenizer belongs into the folder of a model; `None` if it is not read from a file.
    ///
    /// # Errors
    /// The files next to it cannot be read.
    fn published(&self) -> Result<Option<PublishedTokenizer>, DataError> {
        Ok(None)
    }
    /// A hash that differs between tokenizers that encode the same documents differently; 0 for the
    /// byte-level tokenizer.
    fn hash(&self) -> u64;
    /// A hash that differs between tokenizers that encode the same prompts differently.
    fn prompt_hash(&self) -> u64 {
        self.hash()
    }
}

/// Decodes text incrementally, one token at a time.
///
/// The concatenated results of [`push`](Self::push) and [`finish`](Self::finish) equal
/// [`Tokenizer::decode`] of all tokens, and no result ends inside a character.
pub trait TextStream: Debug {
    /// Adds `token` and returns the text that later tokens cannot change; empty inside a character.
    fn push(&mut self, token: u32) -> String;
    /// Returns the text that was held back because a later token could have changed it: usually
    /// none, else the remains of an incomplete character.
    fn finish(&mut self) -> String;
}

/// Converts a loss in nats per token into bits per byte of text.
///
/// `bytes_per_token` is the mean over the text ([`TokenDataset::bytes_per_token`]).
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

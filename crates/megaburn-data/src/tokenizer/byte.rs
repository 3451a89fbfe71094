use std::str::from_utf8;

use super::{PieceEncoder, TextStream, Tokenizer};
use crate::error::DataError;

/// A tokenizer whose tokens are bytes: ids 0 to 255 are the bytes of UTF-8, followed by four
/// special tokens.
///
/// ```
/// use megaburn_data::{ByteTokenizer, Tokenizer};
///
/// assert_eq!(ByteTokenizer.encode("hé")?, [104, 195, 169]);
/// assert_eq!(ByteTokenizer.decode(&[104, 195, 169, ByteTokenizer::EOS]), "hé");
/// assert_eq!(ByteTokenizer.vocab_size(), 260);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// The token that starts a text.
    pub const BOS: u32 = 256;
    /// The token that separates documents.
    pub const EOS: u32 = 257;
    /// The token that pads short samples.
    pub const PAD: u32 = 258;
    /// The unknown token. Encoding never produces it, as every byte has an id.
    pub const UNK: u32 = 259;
    /// 256 bytes and four special tokens.
    pub const VOCAB_SIZE: usize = 260;
}

impl Tokenizer for ByteTokenizer {
    fn vocab_size(&self) -> usize {
        Self::VOCAB_SIZE
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn pieces(&self, _are_prompts: bool) -> Option<Box<dyn PieceEncoder + '_>> {
        Some(Box::new(BytePieces))
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(tokens.len());
        tokens
            .iter()
            .for_each(|&token| push_bytes(token, &mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        Box::new(ByteStream::default())
    }

    fn eos(&self) -> u32 {
        Self::EOS
    }

    fn bos(&self) -> Option<u32> {
        Some(Self::BOS)
    }

    fn pad(&self) -> Option<u32> {
        Some(Self::PAD)
    }

    fn is_byte_level(&self) -> bool {
        true
    }

    fn hash(&self) -> u64 {
        0
    }
}

/// Cuts texts between characters.
#[derive(Debug)]
struct BytePieces;

impl PieceEncoder for BytePieces {
    fn end(&self, text: &str, least: usize) -> Result<Option<usize>, DataError> {
        let at = text.ceil_char_boundary(least.max(1));
        Ok((at < text.len()).then_some(at))
    }

    fn encode(&self, piece: &str, _is_first: bool, _is_last: bool) -> Result<Vec<u32>, DataError> {
        ByteTokenizer.encode(piece)
    }
}

fn push_bytes(token: u32, bytes: &mut Vec<u8>) {
    match token {
        0..=255 => bytes.push(token as u8),
        ByteTokenizer::UNK => bytes.extend("\u{FFFD}".bytes()),
        ByteTokenizer::BOS | ByteTokenizer::EOS | ByteTokenizer::PAD => {}
        // A vocabulary that is padded for tensor parallelism has ids without meaning.
        _ => bytes.extend("\u{FFFD}".bytes()),
    }
}

/// Holds back at most three bytes: the start of a character that is still incomplete.
#[derive(Debug, Default)]
struct ByteStream {
    pending: Vec<u8>,
}

impl TextStream for ByteStream {
    fn push(&mut self, token: u32) -> String {
        push_bytes(token, &mut self.pending);
        let open = self.pending.utf8_chunks().last().map_or(0, |chunk| {
            let rest = chunk.invalid();
            // `error_len` is `None` exactly if further bytes could complete the character.
            let open = from_utf8(rest).is_err_and(|e| e.error_len().is_none());
            if open { rest.len() } else { 0 }
        });
        let rest = self.pending.split_off(self.pending.len() - open);
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending = rest;
        text
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_comes_back_as_it_went_in(text in "\\PC*") {
            let tokens = ByteTokenizer.encode(&text).unwrap();
            prop_assert_eq!(tokens.len(), text.len());
            prop_assert!(tokens.iter().all(|&t| t < 256));
            prop_assert_eq!(ByteTokenizer.decode(&tokens), text);
        }

        #[test]
        fn any_bytes_decode_as_lossy_utf8(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let tokens: Vec<u32> = bytes.iter().map(|&b| b.into()).collect();
            prop_assert_eq!(ByteTokenizer.decode(&tokens), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn a_stream_gives_the_same_text_as_the_whole(
            tokens in prop::collection::vec(prop_oneof![0u32..300, 0x80u32..0xF8], 0..64)
        ) {
            let mut stream = ByteTokenizer.stream();
            let mut text: String = tokens.iter().map(|&t| stream.push(t)).collect();
            text += &stream.finish();
            prop_assert_eq!(text, ByteTokenizer.decode(&tokens));
        }

        #[test]
        fn a_stream_of_text_never_shows_half_a_character(text in "[a-zé€𝄞\u{301}]{0,24}") {
            let mut stream = ByteTokenizer.stream();
            let mut seen = String::new();
            for token in ByteTokenizer.encode(&text).unwrap() {
                seen += &stream.push(token);
                prop_assert!(text.starts_with(&seen), "{seen:?} of {text:?}");
            }
            prop_assert_eq!(stream.finish(), "");
            prop_assert_eq!(seen, text);
        }
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let mut stream = ByteTokenizer.stream();
        let parts: Vec<String> = [0xE2, 0x82, 0xAC, 0xE2, 0x41]
            .map(|t| stream.push(t))
            .into();
        assert_eq!(parts, ["", "", "€", "", "\u{FFFD}A"]);
        stream.push(0xF0);
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn special_tokens_are_distinct_and_inside_the_vocabulary() {
        let t: &dyn Tokenizer = &ByteTokenizer;
        assert_eq!(t.vocab_size(), 260);
        assert_eq!((t.bos(), t.eos(), t.pad()), (Some(256), 257, Some(258)));
        assert!(t.is_byte_level());
        assert_eq!(t.decode(&[256, 72, 105, 258, 257]), "Hi");
        assert_eq!(t.decode(&[259, 260, 9999]), "\u{FFFD}\u{FFFD}\u{FFFD}");
    }
}

use super::{
    SPACE,
    proto::{SentencePieceModel, byte},
};

/// Joins tokens to a text: spaces for [`SPACE`], characters for runs of bytes, and without the
/// space that the normalizer adds.
///
/// Source: SentencePiece `src/sentencepiece_processor.cc`.
#[derive(Clone, Debug)]
pub(in super::super) struct PieceDecoder {
    byte_fallback: bool,
    add_dummy_prefix: bool,
    remove_extra_spaces: bool,
    /// The spelling and the text of the unknown token.
    unknown: [String; 2],
}

impl PieceDecoder {
    /// The decoder of a model, whose token for unknown parts is `unknown`.
    pub(in super::super) fn new(model: &SentencePieceModel, unknown: &str) -> Self {
        Self {
            byte_fallback: model.byte_fallback,
            add_dummy_prefix: model.normalizer.add_dummy_prefix,
            remove_extra_spaces: model.normalizer.remove_extra_spaces,
            unknown: [unknown.into(), model.unknown_text.clone()],
        }
    }

    pub(in super::super) fn decode(&self, tokens: &[String]) -> String {
        let mut text = String::new();
        let mut bytes = Vec::new();
        // Whether a space that was added may still come, and whether it has come.
        let (mut is_start, mut seen) = (true, false);
        for token in tokens {
            if let Some(byte) = byte(token).filter(|_| self.byte_fallback) {
                bytes.push(byte);
                continue;
            }
            flush(&mut bytes, &mut text);
            is_start &= !seen && text.is_empty();
            seen = false;
            if *token == self.unknown[0] {
                text += &self.unknown[1];
                continue;
            }
            let mut token = token.as_str();
            if is_start
                && (self.add_dummy_prefix || self.remove_extra_spaces)
                && let Some(rest) = token.strip_prefix(SPACE)
            {
                token = rest;
                seen = !self.remove_extra_spaces;
            }
            text.extend(token.chars().map(|c| if c == SPACE { ' ' } else { c }));
        }
        flush(&mut bytes, &mut text);
        text
    }
}

/// Appends a run of bytes, with U+FFFD for each byte that is not part of a character.
fn flush(bytes: &mut Vec<u8>, text: &mut String) {
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| '\u{FFFD}'));
    }
    bytes.clear();
}

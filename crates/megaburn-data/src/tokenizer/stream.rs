use tokenizers::Tokenizer;

use super::TextStream;

/// Decodes token by token with whatever decoder a `tokenizer.json` names.
///
/// Decoders look at what is around a token: the first space of a text goes, bytes become a
/// character together, and byte-fallback gives up a whole run of bytes for one that fits nowhere.
/// So the last piece that was shown is always decoded again in front of what is new, and text is
/// held back while a stray byte behind it would change it.
pub(super) struct HfStream<'a> {
    tokenizer: &'a Tokenizer,
    /// A token that is a byte which no character starts or goes on with, where there is one.
    stray_byte: Option<u32>,
    /// The last piece that was shown whole, then the tokens since.
    ids: Vec<u32>,
    /// Length of that piece in tokens.
    num_context: usize,
    /// What was shown of the text of `ids`.
    shown: String,
}

impl std::fmt::Debug for HfStream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HfStream")
            .field("ids", &self.ids)
            .field("shown", &self.shown)
            .finish()
    }
}

impl<'a> HfStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        // Byte-level alphabets need none: what they leave open shows as U+FFFD.
        let fallback = |byte: u8| tokenizer.token_to_id(&format!("<0x{byte:02X}>"));
        let stray_byte = (0x80..=0xFF).rev().find_map(fallback);
        Self {
            tokenizer,
            stray_byte,
            ids: Vec::new(),
            num_context: 0,
            shown: String::new(),
        }
    }
}

/// The text of `ids`, special tokens left out.
pub(super) fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    tokenizer
        .decode(ids, true)
        .unwrap_or_else(|_| "\u{FFFD}".into())
}

impl TextStream for HfStream<'_> {
    fn push(&mut self, token: u32) -> String {
        self.ids.push(token);
        let text = decode(self.tokenizer, &self.ids);
        let mut certain = text.as_str();
        if let Some(stray) = self.stray_byte {
            self.ids.push(stray);
            certain = common_start(certain, &decode(self.tokenizer, &self.ids));
            self.ids.pop();
        }
        certain = certain.trim_end_matches('\u{FFFD}');
        let new = certain
            .strip_prefix(&self.shown)
            .unwrap_or_default()
            .to_string();
        if !new.is_empty() {
            self.shown = certain.into();
        }
        if certain.len() == text.len() {
            let piece = decode(self.tokenizer, &self.ids[self.num_context..]);
            // One without text could not stand for all that came before it.
            if !piece.is_empty() {
                self.ids.drain(..self.num_context);
                self.num_context = self.ids.len();
                self.shown = piece;
            }
        }
        new
    }

    fn finish(&mut self) -> String {
        let text = decode(self.tokenizer, &self.ids);
        let rest = text
            .strip_prefix(&self.shown)
            .unwrap_or_default()
            .to_string();
        self.shown = text;
        rest
    }
}

fn common_start<'t>(text: &'t str, other: &str) -> &'t str {
    let same = |((i, a), b): ((usize, char), char)| (a == b).then_some(i + a.len_utf8());
    let end = text
        .char_indices()
        .zip(other.chars())
        .map_while(same)
        .last()
        .unwrap_or(0);
    &text[..end]
}

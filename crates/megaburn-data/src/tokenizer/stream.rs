use super::{TextStream, encoder::Encoder};

/// Decodes one token at a time with the decoder of its tokenizer.
///
/// Decoders look at the surrounding tokens: the first space of a text is removed, several bytes
/// together form a character, and byte fallback replaces a complete run of bytes if one of them is
/// invalid. Therefore the last piece that was shown is decoded again together with the new tokens,
/// and text is held back while a stray byte after it would change it.
pub(super) struct HfStream<'a> {
    tokenizer: &'a Encoder,
    /// The token of a byte that no UTF-8 character contains, if the vocabulary has one.
    stray_byte: Option<u32>,
    /// The tokens of the last piece that was shown completely, then the tokens since.
    ids: Vec<u32>,
    /// Number of tokens of that piece.
    num_context: usize,
    /// The part of the text of `ids` that was shown.
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
    pub(super) fn new(tokenizer: &'a Encoder) -> Self {
        // Byte-level alphabets need no stray byte: their incomplete characters decode to U+FFFD.
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

/// The text of `ids` without special tokens.
pub(super) fn decode(tokenizer: &Encoder, ids: &[u32]) -> String {
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
            // A piece without text could not serve as context in place of the tokens before it.
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

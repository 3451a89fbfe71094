use std::ops::Range;

use tokenizers::Token;

/// What a part of a text without a token becomes.
#[derive(Clone, Debug, Default)]
pub(super) enum Unknown {
    /// Nothing.
    #[default]
    Nothing,
    /// The tokens of its bytes.
    Bytes(Box<[u32; 256]>),
    /// A token for unknown parts; neighbouring parts share one.
    Token(u32),
}

impl Unknown {
    /// Appends the tokens of the range of `text`.
    pub(super) fn push(&self, text: &str, range: Range<usize>, tokens: &mut Vec<Token>) {
        match self {
            Self::Nothing => {}
            Self::Bytes(ids) => {
                let bytes = text.as_bytes()[range.clone()].iter();
                let ids = bytes.map(|&byte| ids[usize::from(byte)]);
                tokens
                    .extend(ids.map(|id| Token::new(id, String::new(), (range.start, range.end))));
            }
            Self::Token(unknown) => match tokens.last_mut() {
                Some(last) if last.id == *unknown && last.offsets.1 == range.start => {
                    last.offsets.1 = range.end;
                }
                _ => tokens.push(Token::new(
                    *unknown,
                    String::new(),
                    (range.start, range.end),
                )),
            },
        }
    }
}

//! A document as the characters between which it can be divided.

use crate::{error::DataError, tokenizer::Tokenizer};

/// U+FFFD, which stands in decoded text for bytes that are no character.
const REPLACEMENT: char = '\u{FFFD}';
/// Most tokens of a character that the end of a sample cuts: up to three of its four bytes.
const MOST_CUT: usize = 3;

/// A part of a document.
#[derive(Clone, Debug, PartialEq)]
enum Piece {
    /// Text, which is encoded anew if it is divided.
    Text(String),
    /// Tokens that are no text: special ones, or bytes of a character that was cut. They are kept
    /// as they are and count as one character.
    Tokens(Vec<u32>),
}

/// A document, or a part of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Characters(Vec<Piece>);

impl Characters {
    /// The characters of a document.
    ///
    /// # Errors
    /// The tokenizer cannot encode a text.
    pub(super) fn of(tokens: &[u32], tokenizer: &dyn Tokenizer) -> Result<Self, DataError> {
        let mut pieces = Vec::new();
        for run in tokens.chunk_by(|a, b| !tokenizer.is_special(*a) && !tokenizer.is_special(*b)) {
            if tokenizer.is_special(run[0]) {
                pieces.push(Piece::Tokens(run.to_vec()));
            } else {
                push_text(run, tokenizer, &mut pieces)?;
            }
        }
        Ok(Self(pieces))
    }

    /// Number of characters.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(Piece::len).sum()
    }

    /// Whether there is any text.
    pub(super) fn has_text(&self) -> bool {
        self.0.iter().any(|piece| matches!(piece, Piece::Text(_)))
    }

    /// Whether the text starts with `start`.
    pub(super) fn starts_with(&self, start: &str) -> bool {
        let mut rest = start;
        for piece in &self.0 {
            let Piece::Text(text) = piece else { continue };
            match rest.strip_prefix(text.as_str()) {
                Some(left) => rest = left,
                None => return text.starts_with(rest),
            }
        }
        rest.is_empty()
    }

    /// The characters before place `at`, and those from there on.
    pub(super) fn split_at(&self, at: usize) -> [Self; 2] {
        let [mut before, mut after] = [Self::default(), Self::default()];
        let mut left = at;
        for piece in &self.0 {
            let len = piece.len();
            match piece {
                Piece::Text(text) if 0 < left && left < len => {
                    let byte = text
                        .char_indices()
                        .nth(left)
                        .map_or(text.len(), |(at, _)| at);
                    let (head, tail) = text.split_at(byte);
                    before.0.push(Piece::Text(head.into()));
                    after.0.push(Piece::Text(tail.into()));
                }
                _ if left > 0 => before.0.push(piece.clone()),
                _ => after.0.push(piece.clone()),
            }
            left = left.saturating_sub(len);
        }
        [before, after]
    }

    /// The ids of the parts; `None` if the tokenizer does not give the text back.
    ///
    /// # Errors
    /// The tokenizer cannot encode a text.
    pub(super) fn encode(&self, tokenizer: &dyn Tokenizer) -> Result<Option<Vec<u32>>, DataError> {
        let mut ids = Vec::new();
        for piece in &self.0 {
            match piece {
                Piece::Tokens(tokens) => ids.extend(tokens),
                Piece::Text(text) => {
                    let encoded = tokenizer.encode(text)?;
                    if tokenizer.decode(&encoded) != *text {
                        return Ok(None);
                    }
                    ids.extend(encoded);
                }
            }
        }
        Ok(Some(ids))
    }

    /// Whether these characters are still the same text if the ids of `next` follow theirs.
    /// SentencePiece puts a space before each text that is encoded on its own.
    pub(super) fn joins(&self, next: &Self, tokenizer: &dyn Tokenizer) -> Result<bool, DataError> {
        let (Some(Piece::Text(head)), Some(Piece::Text(tail))) = (self.0.last(), next.0.first())
        else {
            return Ok(true);
        };
        let ids = [tokenizer.encode(head)?, tokenizer.encode(tail)?].concat();
        Ok(tokenizer.decode(&ids) == format!("{head}{tail}"))
    }

    /// These characters and the `next` ones, as one text where they meet.
    pub(super) fn followed_by(mut self, next: Self) -> Self {
        for piece in next.0 {
            match (self.0.last_mut(), piece) {
                (Some(Piece::Text(text)), Piece::Text(more)) => text.push_str(&more),
                (_, piece) => self.0.push(piece),
            }
        }
        self
    }
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.chars().count(),
            Self::Tokens(_) => 1,
        }
    }
}

/// Adds tokens that are not special. The ends of a sample can cut a character, whose tokens become
/// pieces of their own.
fn push_text(
    run: &[u32],
    tokenizer: &dyn Tokenizer,
    pieces: &mut Vec<Piece>,
) -> Result<(), DataError> {
    let mut text = tokenizer.decode(run);
    // The character U+FFFD itself may occur in text.
    if text.contains(REPLACEMENT) && tokenizer.encode(&text)? == run {
        pieces.push(Piece::Text(text));
        return Ok(());
    }
    let (mut start, mut end) = (0, run.len());
    while text.starts_with(REPLACEMENT) && start < MOST_CUT.min(end) {
        start += 1;
        text = tokenizer.decode(&run[start..]);
    }
    while text.ends_with(REPLACEMENT) && start < end && run.len() - end < MOST_CUT {
        end -= 1;
        text = tokenizer.decode(&run[start..end]);
    }
    let (before, core, after) = (&run[..start], &run[start..end], &run[end..]);
    if text.is_empty() || !is_kept(&text, [before, core, after], tokenizer)? {
        pieces.push(Piece::Tokens(run.to_vec()));
        return Ok(());
    }
    if !before.is_empty() {
        pieces.push(Piece::Tokens(before.to_vec()));
    }
    pieces.push(Piece::Text(text));
    if !after.is_empty() {
        pieces.push(Piece::Tokens(after.to_vec()));
    }
    Ok(())
}

/// Whether tokens still mean the same if those in the middle are replaced by an encoding of their
/// text.
fn is_kept(
    text: &str,
    [before, core, after]: [&[u32]; 3],
    tokenizer: &dyn Tokenizer,
) -> Result<bool, DataError> {
    // Decoding replaces invalid UTF-8 by U+FFFD, so such a text must encode to the same tokens again.
    if text.contains(REPLACEMENT) {
        return Ok(tokenizer.encode(text)? == core);
    }
    if before.is_empty() && after.is_empty() {
        return Ok(true);
    }
    let encoded = [before, &tokenizer.encode(text)?, after].concat();
    Ok(tokenizer.decode(&encoded) == tokenizer.decode(&[before, core, after].concat()))
}

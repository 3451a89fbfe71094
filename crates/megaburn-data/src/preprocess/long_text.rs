//! Reads a text in pieces.

use std::io::{self, BufRead, Read};
use std::path::Path;

use crate::{error::DataError, tokenizer::PieceEncoder};

/// Bytes that are read again when the next ones are known, because a place near the end could not be
/// judged.
const OVERLAP: usize = 1 << 10;
/// Bytes that are checked at a time.
const BLOCK: usize = 1 << 16;

/// A text that is read in pieces of at least a number of bytes.
pub(super) struct LongText<'a, R> {
    source: R,
    pieces: &'a dyn PieceEncoder,
    piece_bytes: usize,
    /// What was read, from the beginning of the next piece on.
    read: Vec<u8>,
    /// Whether all of the text was read.
    is_ended: bool,
}

impl<'a, R: Read> LongText<'a, R> {
    pub(super) fn new(source: R, pieces: &'a dyn PieceEncoder, piece_bytes: usize) -> Self {
        Self {
            source,
            pieces,
            piece_bytes,
            read: Vec::new(),
            is_ended: false,
        }
    }

    /// All of the text, if it is at most twice as long as a piece.
    pub(super) fn whole(&mut self) -> io::Result<Option<Vec<u8>>> {
        self.read_to(2 * self.piece_bytes)?;
        Ok(self.is_ended.then(|| std::mem::take(&mut self.read)))
    }

    /// The next piece, and whether it is the last one.
    ///
    /// # Errors
    /// The file `path` cannot be read, or is not the text that was checked; a part of the text cannot
    /// be encoded.
    pub(super) fn next(&mut self, path: &Path) -> Result<(String, bool), DataError> {
        let changed = |_| DataError::Changed { path: path.into() };
        let mut least = self.piece_bytes;
        loop {
            // Twice as much each time, so that a text without an end of a piece is not checked often.
            let wanted = least + least.max(self.piece_bytes) + OVERLAP;
            self.read_to(wanted).map_err(|source| DataError::Io {
                path: path.into(),
                source,
            })?;
            if self.is_ended && self.read.len() <= self.piece_bytes {
                let last = std::mem::take(&mut self.read);
                return Ok((String::from_utf8(last).map_err(changed)?, true));
            }
            let found = match std::str::from_utf8(&self.read[..]) {
                Ok(text) => self.pieces.end(text, least)?,
                Err(error) if error.error_len().is_some() || self.is_ended => {
                    return Err(DataError::Changed { path: path.into() });
                }
                Err(error) => {
                    let known = &self.read[..error.valid_up_to()];
                    let text = std::str::from_utf8(known).unwrap_or_default();
                    self.pieces.end(text, least)?
                }
            };
            if let Some(end) = found {
                let rest = self.read.split_off(end);
                let piece = std::mem::replace(&mut self.read, rest);
                return Ok((String::from_utf8(piece).map_err(changed)?, false));
            }
            if self.is_ended {
                let last = std::mem::take(&mut self.read);
                return Ok((String::from_utf8(last).map_err(changed)?, true));
            }
            least = least.max(self.read.len().saturating_sub(OVERLAP));
        }
    }

    /// Reads until `count` bytes are known, or the text ends.
    fn read_to(&mut self, count: usize) -> io::Result<()> {
        let missing = count.saturating_sub(self.read.len()) as u64;
        if self.is_ended || missing == 0 {
            return Ok(());
        }
        let read = self
            .source
            .by_ref()
            .take(missing)
            .read_to_end(&mut self.read)?;
        self.is_ended = (read as u64) < missing;
        Ok(())
    }
}

/// Why a text is not UTF-8; `None` if it is.
pub(super) fn not_utf8(source: &mut dyn BufRead) -> io::Result<Option<String>> {
    let (mut at, mut open) = (0u64, Vec::new());
    loop {
        let read = source.take(BLOCK as u64).read_to_end(&mut open)?;
        let known = match std::str::from_utf8(&open) {
            Ok(text) => text.len(),
            // The next bytes may complete the character.
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                let bad = at + error.valid_up_to() as u64;
                let size = at + open.len() as u64 + io::copy(source, &mut io::sink())?;
                return Ok(Some(why_not_utf8(bad, size, "file")));
            }
        };
        if read == 0 {
            return Ok(None);
        }
        open.drain(..known);
        at += known as u64;
    }
}

/// The message for a byte of `whole`, which has `size` bytes.
pub(super) fn why_not_utf8(at: u64, size: u64, whole: &str) -> String {
    format!("not UTF-8: byte {at} of the {size} of the {whole} starts no valid character")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{ByteTokenizer, Tokenizer};

    #[test]
    fn the_first_byte_that_is_not_utf8_is_named() {
        for length in [0, 1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK + 5] {
            let text = "é".repeat(length / 2) + &"x".repeat(length % 2) + "€";
            assert_eq!(not_utf8(&mut text.as_bytes()).unwrap(), None, "{length}");
            let mut cut = text.into_bytes();
            cut.pop();
            let why = format!("byte {length} of the {} of the file", length + 2);
            let found = not_utf8(&mut cut.as_slice()).unwrap().unwrap();
            assert!(found.contains(&why), "{found}");
            cut.extend([b'a', 0xFF]);
            let why = format!("byte {length} of the {} of the file", length + 4);
            let found = not_utf8(&mut cut.as_slice()).unwrap().unwrap();
            assert!(found.contains(&why), "{found}");
        }
    }

    #[test]
    fn pieces_are_the_text_and_have_the_size() {
        let mut draw = fastrand::Rng::new();
        let pieces = ByteTokenizer.pieces(false).unwrap();
        for length in [7, 400, 5000] {
            let text: String = (0..length).map(|_| draw.char(..)).collect();
            let size = draw.usize(1..100);
            let mut source = LongText::new(text.as_bytes(), pieces.as_ref(), size);
            let mut found = String::new();
            loop {
                let (piece, is_last) = source.next(Path::new("a")).unwrap();
                assert!(piece.len() < size + 4, "{}", piece.len());
                assert!(is_last || piece.len() >= size);
                found += &piece;
                if is_last {
                    break;
                }
            }
            assert_eq!(found, text);
        }
    }
}

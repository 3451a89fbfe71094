//! Splits documents into pieces of bounded size, so that all cores have work and a long document
//! does not need many times its length in memory.

use tokenizers::parallelism::MaybeParallelRefIterator;

use crate::error::DataError;

/// Number of bytes that one thread encodes at a time.
const PIECE: usize = 1 << 16;
/// Words of more than this number of bytes are cut before they are counted.
const LONGEST_WORD: usize = 1 << 10;
/// Number of bytes on each side of a cut that must give the same tokens with and without the cut.
const WINDOW: usize = 256;
/// Number of line ends that are tried for a cut.
const TRIES: usize = 4;

/// Encodes texts on the threads of the rayon pool (`RAYON_NUM_THREADS`).
///
/// A text of more than [`PIECE`] bytes is cut after a line break. A cut is accepted if the text
/// around it encodes to the same tokens with and without the cut. If all tries fail (as for a
/// tokenizer that adds a space at the start of every text), the text is not cut. The cuts depend on
/// the text alone.
pub(super) fn encode<F>(texts: &[&str], encode: F) -> Result<Vec<Vec<u32>>, DataError>
where
    F: Fn(&str) -> Result<Vec<u32>, DataError> + Sync,
{
    let mut pieces = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let harmless = |at: usize| -> Result<bool, DataError> {
            let (left, right) = around(text, at);
            let mut apart = encode(left)?;
            apart.extend(encode(right)?);
            Ok(apart == encode(&[left, right].concat())?)
        };
        pieces.extend(cut(text, harmless)?.into_iter().map(|piece| (index, piece)));
    }
    let ids: Vec<_> = pieces
        .maybe_par_iter()
        .map(|(_, piece)| encode(piece))
        .collect();
    let mut encoded = vec![Vec::new(); texts.len()];
    for ((index, _), ids) in pieces.iter().zip(ids) {
        let ids = ids?;
        if encoded[*index].is_empty() {
            encoded[*index] = ids;
        } else {
            encoded[*index].extend(ids);
        }
    }
    Ok(encoded)
}

/// Encodes texts on the threads of the rayon pool, each as a whole.
pub(super) fn encode_whole<F>(texts: &[&str], encode: F) -> Result<Vec<Vec<u32>>, DataError>
where
    F: Fn(&str) -> Result<Vec<u32>, DataError> + Sync,
{
    let texts = texts.maybe_par_iter();
    texts.map(|text| encode(text)).collect()
}

/// Splits a text at line breaks into pieces of at most [`PIECE`] bytes, if the lines allow. For
/// counting words only: a cut may change the tokens.
pub(super) fn lines(text: &str) -> Vec<&str> {
    cut(text, |_| Ok::<_, std::convert::Infallible>(true)).unwrap_or_else(|never| match never {})
}

/// Like [`lines`], but also cuts words of more than [`LONGEST_WORD`] bytes: the time to learn
/// merges grows with the square of the longest word.
pub(super) fn short_words(text: &str) -> Vec<&str> {
    lines(text).into_iter().flat_map(cut_words).collect()
}

fn cut_words(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut start = 0;
    let mut word = 0;
    for (at, char) in text.char_indices() {
        if char.is_whitespace() {
            word = at + char.len_utf8();
        } else if at + char.len_utf8() - word > LONGEST_WORD {
            pieces.push(&text[start..at]);
            start = at;
            word = at;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

fn cut<E>(text: &str, harmless: impl Fn(usize) -> Result<bool, E>) -> Result<Vec<&str>, E> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while text.len() - start > PIECE {
        let from = ceil(text, start + PIECE / 2);
        let mut at = None;
        for candidate in line_ends(text, from).take(TRIES) {
            if harmless(candidate)? {
                at = Some(candidate);
                break;
            }
        }
        let Some(at) = at else { break };
        pieces.push(&text[start..at]);
        start = at;
    }
    pieces.push(&text[start..]);
    Ok(pieces)
}

/// Positions after a line break that has a visible ASCII character on both sides, so that no run of
/// whitespace is cut.
fn line_ends(text: &str, from: usize) -> impl Iterator<Item = usize> {
    let bytes = text.as_bytes();
    let solid = |at: usize| bytes.get(at).is_some_and(|b| b.is_ascii_graphic());
    let breaks = text[from..].match_indices('\n').map(move |(i, _)| from + i);
    breaks
        .filter(move |&i| i > 0 && solid(i - 1) && solid(i + 1))
        .map(|i| i + 1)
}

fn around(text: &str, at: usize) -> (&str, &str) {
    let start = ceil(text, at.saturating_sub(WINDOW));
    let end = ceil(text, (at + WINDOW).min(text.len()));
    (&text[start..at], &text[at..end])
}

/// The first character boundary at or after `at`.
fn ceil(text: &str, at: usize) -> usize {
    (at..text.len())
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn text(lines: usize) -> String {
        (0..lines)
            .map(|i| format!("line {i} größer\n{}", if i % 5 == 0 { "\n  " } else { "" }))
            .collect()
    }

    #[test]
    fn pieces_are_bounded_end_with_lines_and_join_to_the_text() {
        let text = text(20_000);
        let pieces = lines(&text);
        assert!(pieces.len() > text.len() / PIECE, "{}", pieces.len());
        assert!(pieces.iter().all(|piece| piece.len() <= PIECE));
        assert!(
            pieces
                .windows(2)
                .all(|two| two[0].ends_with("r\n") && two[1].starts_with('l'))
        );
        assert_eq!(pieces.concat(), text);
    }

    #[test]
    fn a_text_is_cut_only_where_the_tokens_do_not_see_it() {
        let text = text(20_000);
        let longest = Mutex::new(0);
        let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let of_bytes = |text: &str| {
            let mut longest = longest.lock().unwrap();
            *longest = text.len().max(*longest);
            Ok(bytes(text))
        };
        assert!(encode(&[&text, "", "x"], of_bytes).unwrap() == [bytes(&text), vec![], vec![120]]);
        assert!(*longest.lock().unwrap() <= PIECE);

        // A tokenizer that starts every text with a token of its own cannot be cut.
        let started = |text: &str| Ok([vec![999], bytes(text)].concat());
        assert!(encode(&[&text], started).unwrap() == [[vec![999], bytes(&text)].concat()]);
    }

    #[test]
    fn words_without_an_end_are_cut_for_counting() {
        let long = "é".repeat(5 * LONGEST_WORD);
        let text = format!("some words before {long} and behind\nand {long}");
        let pieces = short_words(&text);
        assert_eq!(pieces.concat(), text);
        let words = pieces.iter().flat_map(|piece| piece.split_whitespace());
        assert!(words.clone().all(|word| word.len() <= LONGEST_WORD));
        assert_eq!(
            words.filter(|word| word.len() == LONGEST_WORD).count(),
            2 * 10
        );
        assert_eq!(short_words("plain words"), ["plain words"]);
    }

    #[test]
    fn a_text_without_lines_stays_whole() {
        for text in [
            "a".repeat(3 * PIECE),
            "é".repeat(PIECE),
            "\n ".repeat(PIECE),
        ] {
            assert_eq!(lines(&text), [text.as_str()]);
        }
    }
}

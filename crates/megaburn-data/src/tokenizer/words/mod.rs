//! Encodes text word by word, and remembers the ids of words.
//!
//! Most tokenizers cut a text into words, with a regular expression or before spaces, and give each
//! to a model that sees nothing else. `tokenizers` keeps for each character where it came from,
//! which takes more time and memory than all the rest. Here the same words are found without that.

mod added;
mod ends;
mod form;
mod limits;
mod pattern;
mod spaces;
mod table;
#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

use regex_automata::hybrid::dfa::Cache;
use serde_json::{Value, json};
use tokenizers::{Error, Model};

use super::encoder::{Encoder, EncoderNormalizer};
use added::{Added, Part};
use pattern::Pattern;
use spaces::{MARK, Prefix, Start};
use table::WordTable;

pub(super) use ends::PieceEnds;

/// The expression of the pre-tokenizer `ByteLevel`, which is GPT-2's.
const BYTE_LEVEL: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Encodes text as a tokenizer of `tokenizers` does.
#[derive(Debug)]
pub(super) struct Words {
    added: Added,
    cut: Cut,
    /// States that no thread uses.
    free: Mutex<Vec<State>>,
}

/// How words are cut and spelled.
#[derive(Debug)]
enum Cut {
    /// By expressions, each of which cuts the pieces of the one before; a character of a spelling
    /// is a byte. The normalizer, if there is one, brings the text into a Unicode form.
    Patterns {
        patterns: Vec<Pattern>,
        spelling: Vec<char>,
    },
    /// Before spaces, which are spelled as marks.
    Spaces(Prefix),
}

/// What one thread needs.
#[derive(Debug)]
struct State {
    caches: Vec<Cache>,
    seen: Seen,
    ids: Vec<u32>,
}

/// The words that were seen before.
#[derive(Debug, Default)]
struct Seen {
    table: WordTable,
    spelled: String,
    new: Vec<u32>,
}

impl Words {
    /// `None` for a tokenizer that works in another way, or is not known to work in this way.
    pub(super) fn of(tokenizer: &Encoder) -> Option<Self> {
        let cut = Cut::of(tokenizer)?;
        let has_normalizer = tokenizer.get_normalizer().is_some();
        let is_kept = |content: &str| {
            let is_form = matches!(cut, Cut::Patterns { .. });
            !has_normalizer || is_form && content.is_ascii()
        };
        Some(Self {
            added: Added::of(tokenizer, is_kept)?,
            cut,
            free: Mutex::default(),
        })
    }

    /// The ids of a text, without those that the template of the tokenizer adds. `is_continued`
    /// says that it is a piece of a text, after the first one.
    ///
    /// # Errors
    /// The model has no ids for a word.
    pub(super) fn encode(
        &self,
        tokenizer: &Encoder,
        text: &str,
        is_continued: bool,
    ) -> Result<Vec<u32>, Error> {
        let first = match is_continued {
            true => Start::Continued,
            false => Start::First,
        };
        let free = self.free().pop();
        let mut state = free.unwrap_or_else(|| self.state());
        state.ids.reserve(text.len() / 4);
        self.added.raw.split(text, |at, part| match part {
            Part::Token(id) => {
                state.ids.push(id);
                Ok(())
            }
            Part::Text(text) => {
                let start = if at == 0 { first } else { Start::AfterToken };
                self.between(tokenizer, text, start, &mut state)
            }
        })?;
        let ids = std::mem::take(&mut state.ids);
        self.free().push(state);
        Ok(ids)
    }

    /// Adds the ids of a text between added tokens.
    fn between(
        &self,
        tokenizer: &Encoder,
        text: &str,
        start: Start,
        state: &mut State,
    ) -> Result<(), Error> {
        let text = match (&self.cut, tokenizer.get_normalizer()) {
            (Cut::Patterns { .. }, Some(form)) => form::normalize(form, text)?,
            _ => text.into(),
        };
        self.added.normalized.split(&text, |at, part| match part {
            Part::Token(id) => {
                state.ids.push(id);
                Ok(())
            }
            Part::Text(text) => {
                let start = if at == 0 { start } else { Start::AfterToken };
                self.cut.encode(tokenizer, text, start, state)
            }
        })
    }

    fn free(&self) -> MutexGuard<'_, Vec<State>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> State {
        let patterns = match &self.cut {
            Cut::Patterns { patterns, .. } => patterns.as_slice(),
            Cut::Spaces(_) => &[],
        };
        State {
            caches: patterns.iter().map(Pattern::cache).collect(),
            seen: Seen::default(),
            ids: Vec::new(),
        }
    }
}

impl Cut {
    fn of(tokenizer: &Encoder) -> Option<Self> {
        let normalizer = match tokenizer.get_normalizer() {
            Some(EncoderNormalizer::Library(normalizer)) => json!(normalizer),
            Some(EncoderNormalizer::Pieces(_)) => return None,
            None => Value::Null,
        };
        let pre_tokenizer = json!(tokenizer.get_pre_tokenizer());
        if let Some(prefix) = spaces::prefix_of(&normalizer, &pre_tokenizer) {
            return spaces::is_cut(tokenizer.get_model()).then_some(Self::Spaces(prefix));
        }
        if !normalizer.is_null() && !form::is_form(&normalizer) {
            return None;
        }
        Some(Self::Patterns {
            patterns: patterns_of(&pre_tokenizer)?,
            spelling: spelling_of_bytes(),
        })
    }

    /// Adds the ids of a text without added tokens.
    fn encode(
        &self,
        tokenizer: &Encoder,
        text: &str,
        start: Start,
        state: &mut State,
    ) -> Result<(), Error> {
        let State { caches, seen, ids } = state;
        match self {
            Self::Patterns { patterns, spelling } => {
                let spell = |word: &str, spelled: &mut String| {
                    spelled.extend(word.bytes().map(|byte| spelling[usize::from(byte)]));
                };
                cut_all(patterns, caches, text, &mut |word| {
                    seen.add(tokenizer, word, spell, ids)
                })
            }
            Self::Spaces(prefix) => {
                let spell = |word: &str, spelled: &mut String| {
                    spelled.extend(
                        word.chars()
                            .map(|char| if char == ' ' { MARK } else { char }),
                    );
                };
                let mut rest = text;
                if prefix.is_added(text, start) {
                    let (first, after) = text.split_at(spaces::first_word(text));
                    seen.add(tokenizer, &format!(" {first}"), spell, ids)?;
                    rest = after;
                }
                while !rest.is_empty() {
                    let (word, after) = rest.split_at(spaces::first_word(rest));
                    seen.add(tokenizer, word, spell, ids)?;
                    rest = after;
                }
                Ok(())
            }
        }
    }
}

impl Seen {
    /// Adds the ids of a word to `ids`.
    fn add(
        &mut self,
        tokenizer: &Encoder,
        word: &str,
        spell: impl Fn(&str, &mut String),
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if let Some(known) = self.table.get(word) {
            ids.extend(known);
            return Ok(());
        }
        self.spelled.clear();
        spell(word, &mut self.spelled);
        let tokens = tokenizer.get_model().tokenize(&self.spelled)?;
        self.new.clear();
        self.new.extend(tokens.iter().map(|token| token.id));
        ids.extend(&self.new);
        self.table.insert(word, &self.new);
        Ok(())
    }
}

/// Cuts a text by the first pattern, each piece by the next one, and so on.
fn cut_all(
    patterns: &[Pattern],
    caches: &mut [Cache],
    text: &str,
    each: &mut dyn FnMut(&str) -> Result<(), Error>,
) -> Result<(), Error> {
    match (patterns, caches) {
        ([last], [cache]) => last.cut(cache, text, each),
        ([first, patterns @ ..], [cache, caches @ ..]) => first.cut(cache, text, &mut |piece| {
            cut_all(patterns, caches, piece, each)
        }),
        _ => each(text),
    }
}

/// The patterns of a pre-tokenizer, as JSON, that cuts by expressions and ends with the bytes of
/// each word.
fn patterns_of(pre_tokenizer: &Value) -> Option<Vec<Pattern>> {
    let parts = match pre_tokenizer["pretokenizers"].as_array() {
        Some(parts) => parts.as_slice(),
        None => std::slice::from_ref(pre_tokenizer),
    };
    let (bytes, splits) = parts.split_last()?;
    if bytes["type"] != "ByteLevel" || bytes["add_prefix_space"] != false {
        return None;
    }
    let expression = |split: &Value| {
        let is_plain =
            split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
        let expression = split["pattern"]["Regex"].as_str().filter(|_| is_plain)?;
        Pattern::new(expression)
    };
    let mut patterns: Vec<Pattern> = splits.iter().map(expression).collect::<Option<_>>()?;
    if bytes["use_regex"] != false {
        patterns.push(Pattern::new(BYTE_LEVEL)?);
    }
    Some(patterns)
}

/// The character that stands for each byte, by the definition of GPT-2's `bytes_to_unicode`: itself
/// if it is printable in Latin-1, else the next one from U+0100 on.
fn spelling_of_bytes() -> Vec<char> {
    let mut others = '\u{100}'..='\u{1FF}';
    let mut of = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => others.next().unwrap_or_default(),
    };
    (0..=255).map(&mut of).collect()
}

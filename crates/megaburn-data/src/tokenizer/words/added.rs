//! Finds the added tokens of a text, which are no words: what is between them is cut into words.

use regex_automata::meta;
use tokenizers::{AddedToken, Error};

use crate::tokenizer::encoder::Encoder;

/// The added tokens of a tokenizer.
#[derive(Debug)]
pub(super) struct Added {
    /// Those that are found in the text as it is.
    pub(super) raw: Literals,
    /// Those that are found in what the normalizer makes of the text between the others.
    pub(super) normalized: Literals,
}

/// Tokens that are found by their spelling: of those that begin at the first place, the longest.
#[derive(Debug)]
pub(super) struct Literals {
    regex: meta::Regex,
    spellings: Vec<String>,
    /// The ids of the tokens; `None` for those that are to be ordinary text.
    ids: Vec<Option<u32>>,
}

/// A part of a text.
pub(super) enum Part<'t> {
    /// What is between added tokens.
    Text(&'t str),
    /// The id of an added token.
    Token(u32),
}

impl Added {
    /// `None` if a token is found in another way than by its spelling, or if the normalizer could
    /// change the spelling: it leaves those that `is_kept` accepts.
    pub(super) fn of(tokenizer: &Encoder, is_kept: impl Fn(&str) -> bool) -> Option<Self> {
        let tokens: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        let is_plain = |token: &AddedToken| {
            !(token.content.is_empty() || token.lstrip || token.rstrip || token.single_word)
                && (!token.normalized || is_kept(&token.content))
        };
        if !tokens.iter().all(|(_, token)| is_plain(token)) {
            return None;
        }
        let ignores_special = tokenizer.get_encode_special_tokens();
        let literals = |normalized: bool| {
            let chosen = tokens
                .iter()
                .filter(|(_, token)| token.normalized == normalized);
            let with_id = |(id, token): &(u32, AddedToken)| {
                let is_text = ignores_special && token.special;
                (token.content.clone(), (!is_text).then_some(*id))
            };
            Literals::new(chosen.map(with_id).collect())
        };
        Some(Self {
            raw: literals(false)?,
            normalized: literals(true)?,
        })
    }
}

impl Literals {
    fn new(mut tokens: Vec<(String, Option<u32>)>) -> Option<Self> {
        // Of several that match at a place, the regex takes the first.
        tokens.sort_by_key(|(content, _)| std::cmp::Reverse(content.len()));
        let escaped = |(content, _): &(String, Option<u32>)| -> String {
            let chars = content.chars();
            chars
                .map(|char| format!(r"\x{{{:X}}}", char as u32))
                .collect()
        };
        let escaped: Vec<String> = tokens.iter().map(escaped).collect();
        let regex = meta::Regex::new_many(&escaped).ok()?;
        let (spellings, ids) = tokens.into_iter().unzip();
        Some(Self {
            regex,
            spellings,
            ids,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.spellings.is_empty()
    }

    /// Bytes of the longest spelling.
    pub(super) fn longest(&self) -> usize {
        // They are sorted by their lengths.
        self.spellings.first().map_or(0, String::len)
    }

    /// Whether a spelling in a text, also one that is to be ordinary text, begins before a place
    /// and ends there or after it. The text must have [`longest`](Self::longest) bytes after the
    /// place.
    pub(super) fn reach(&self, text: &str, at: usize) -> bool {
        let reaches = |spelling: &String| {
            let begins = at.saturating_sub(spelling.len())..at;
            let mut found = begins.map(|begin| &text.as_bytes()[begin..]);
            found.any(|rest| rest.starts_with(spelling.as_bytes()))
        };
        self.spellings.iter().any(reaches)
    }

    /// Gives each part of a text to `each`, in order, with the place where it begins.
    pub(super) fn split(
        &self,
        text: &str,
        mut each: impl FnMut(usize, Part<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut start = 0;
        if !self.ids.is_empty() {
            for found in self.regex.find_iter(text) {
                let Some(id) = self.ids[found.pattern().as_usize()] else {
                    continue;
                };
                if start < found.start() {
                    each(start, Part::Text(&text[start..found.start()]))?;
                }
                each(found.start(), Part::Token(id))?;
                start = found.end();
            }
        }
        if start < text.len() {
            each(start, Part::Text(&text[start..]))?;
        }
        Ok(())
    }
}

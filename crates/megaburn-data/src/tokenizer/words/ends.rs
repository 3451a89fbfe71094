//! Finds the ends of pieces of a text: where the ids of what is before and after are those of the
//! whole text.

use std::borrow::Cow;

use tokenizers::Error;

use super::{Cut, Words, form, limits::Limits, spaces};
use crate::tokenizer::encoder::Encoder;

/// Places that are compared with an expression in a call. Text in which they all fail, such as one
/// without an end of a word, would take too long.
const TRIES: usize = 256;
/// Bytes next to a place that are normalized at most.
const NEAR: usize = 1 << 10;

/// Finds ends of pieces for a tokenizer that encodes by words.
#[derive(Debug)]
pub(in crate::tokenizer) struct PieceEnds<'t> {
    words: &'t Words,
    encoder: &'t Encoder,
    /// For expressions.
    limits: Option<Limits<'t>>,
}

impl<'t> PieceEnds<'t> {
    /// `None` if all of a text is one word.
    pub(in crate::tokenizer) fn of(words: &'t Words, encoder: &'t Encoder) -> Option<Self> {
        let limits = match &words.cut {
            // Other expressions cut what the first one has cut.
            Cut::Patterns { patterns, .. } => Some(Limits::of(patterns.first()?)),
            Cut::Spaces(_) => None,
        };
        Some(Self {
            words,
            encoder,
            limits,
        })
    }

    /// The first end of a piece that is found at or after byte `least` of a text, which may go on.
    ///
    /// # Errors
    /// The normalizer fails.
    pub(in crate::tokenizer) fn find(
        &self,
        text: &str,
        least: usize,
    ) -> Result<Option<usize>, Error> {
        let least = text.ceil_char_boundary(least.max(1));
        let longest = self.longest_added();
        let mut left = TRIES;
        for (at, _) in text[least..].char_indices() {
            let at = least + at;
            // An added token could begin before the place.
            if at + longest + 2 > text.len() || left == 0 {
                break;
            }
            let (before, after) = text.split_at(at);
            let is_limit = match &self.limits {
                None => spaces::is_limit(before, after),
                Some(_) if before.ends_with(char::is_whitespace) => false,
                Some(limits) => match self.normalized(before, after)? {
                    Some((before, after)) => {
                        left -= 1;
                        limits.is_limit(&before, after)
                    }
                    None => false,
                },
            };
            if is_limit && !self.is_in_added(text, at) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    fn longest_added(&self) -> usize {
        let added = &self.words.added;
        added.raw.longest().max(added.normalized.longest())
    }

    /// Whether a place could be inside of the spelling of an added token, or at its end: what
    /// follows a token does not continue the text before it.
    fn is_in_added(&self, text: &str, at: usize) -> bool {
        let added = &self.words.added;
        if self.encoder.get_normalizer().is_some() && !added.normalized.is_empty() {
            // They are found in normalized text, which near the place has to be the text itself.
            let longest = added.normalized.longest();
            let near = at.saturating_sub(longest)..at + longest + 1;
            if !text.as_bytes()[near].is_ascii() {
                return true;
            }
        }
        added.raw.reach(text, at) || added.normalized.reach(text, at)
    }

    /// What the normalizer makes of the end of `before` and the start of `after`, if it does that
    /// whatever stands around them: a Unicode form sees not over the place before an ASCII
    /// character, and an ASCII character stays as it is before another one. A space and the end of
    /// a line stay before all characters, because no form composes them.
    fn normalized<'s>(
        &self,
        before: &'s str,
        after: &'s str,
    ) -> Result<Option<(Cow<'s, str>, &'s str)>, Error> {
        let Some(normalizer) = self.encoder.get_normalizer() else {
            let before = &before[before.floor_char_boundary(before.len().saturating_sub(NEAR))..];
            let after = &after[..after.floor_char_boundary(NEAR.min(after.len()))];
            return Ok(Some((before.into(), after)));
        };
        let num_ascii = after.bytes().take(NEAR).take_while(u8::is_ascii).count();
        let num_kept = match after.starts_with([' ', '\n']) {
            true => num_ascii.saturating_sub(1).max(1),
            false => num_ascii.saturating_sub(1),
        };
        let near = before.as_bytes();
        let near = &near[near.len().saturating_sub(NEAR)..];
        let Some(last_ascii) = near.iter().rposition(u8::is_ascii) else {
            return Ok(None);
        };
        if num_kept == 0 {
            return Ok(None);
        }
        let begin = before.len() - near.len() + last_ascii;
        let before = form::normalize(normalizer, &before[begin..])?;
        Ok(Some((before, &after[..num_kept])))
    }
}

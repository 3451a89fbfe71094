//! Normalizes text to a Unicode form.

use std::borrow::Cow;

use serde_json::Value;
use tokenizers::{Error, NormalizedString, Normalizer};

use crate::tokenizer::encoder::EncoderNormalizer;

/// The forms. All leave ASCII as it is, and none sees over the place before an ASCII character.
const FORMS: [&str; 4] = ["NFC", "NFD", "NFKC", "NFKD"];

/// Whether a normalizer, as JSON, is one of these forms, or several of them.
pub(super) fn is_form(normalizer: &Value) -> bool {
    match normalizer["normalizers"].as_array() {
        Some(all) => all.iter().all(is_form),
        None => FORMS.iter().any(|form| normalizer["type"] == *form),
    }
}

/// Brings a text into the form of a normalizer, which [`is_form`] accepts. Only what is not ASCII
/// is given to it, with the character before, because the library needs many times the text.
pub(super) fn normalize<'t>(
    normalizer: &EncoderNormalizer,
    text: &'t str,
) -> Result<Cow<'t, str>, Error> {
    if text.is_ascii() {
        return Ok(Cow::Borrowed(text));
    }
    let mut normalized = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let num_ascii = rest.bytes().take_while(u8::is_ascii).count();
        let (plain, other) = match num_ascii == rest.len() {
            true => (rest, ""),
            false => rest.split_at(num_ascii.saturating_sub(1)),
        };
        normalized += plain;
        let after = other.bytes().skip(1).take_while(|byte| !byte.is_ascii());
        let (part, after) = other.split_at((1 + after.count()).min(other.len()));
        if !part.is_empty() {
            let mut part = NormalizedString::from(part);
            normalizer.normalize(&mut part)?;
            normalized += part.get();
        }
        rest = after;
    }
    Ok(Cow::Owned(normalized))
}

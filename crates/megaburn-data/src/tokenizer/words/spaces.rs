//! Cuts text before spaces, for SentencePiece's tokenizers, whose BPE models see the whole text.

use serde_json::Value;
use tokenizers::ModelWrapper;

use crate::tokenizer::encoder::EncoderModel;

/// What a space becomes.
pub(super) const MARK: char = '\u{2581}';

/// Where a text between added tokens begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// It is the first part of its text.
    First,
    /// It follows an added token.
    AfterToken,
    /// It continues a text that was cut here.
    Continued,
}

/// Whether a text between added tokens is given a space at its start.
#[derive(Clone, Copy, Debug)]
pub(super) enum Prefix {
    Never,
    Always,
    /// Unless it begins with one.
    IfMissing,
    /// Unless it begins with one or follows an added token.
    IfMissingAtStart,
}

impl Prefix {
    /// Whether it is added to a text, which is not empty.
    pub(super) fn is_added(self, text: &str, start: Start) -> bool {
        match self {
            _ if start == Start::Continued => false,
            Self::Never => false,
            Self::Always => true,
            Self::IfMissing => !text.starts_with([' ', MARK]),
            Self::IfMissingAtStart => start == Start::First && !text.starts_with([' ', MARK]),
        }
    }
}

/// What the parts of a tokenizer, as JSON, put before a text, if they only turn spaces into marks.
pub(super) fn prefix_of(normalizer: &Value, pre_tokenizer: &Value) -> Option<Prefix> {
    let mark = MARK.to_string();
    let replaces = |part: &Value| {
        part["type"] == "Replace" && part["pattern"]["String"] == " " && part["content"] == mark
    };
    if pre_tokenizer.is_null() {
        let parts = match normalizer["normalizers"].as_array() {
            Some(parts) => parts.as_slice(),
            None => std::slice::from_ref(normalizer),
        };
        return match parts {
            [part] if replaces(part) => Some(Prefix::Never),
            [first, part] if replaces(part) => {
                (first["type"] == "Prepend" && first["prepend"] == mark).then_some(Prefix::Always)
            }
            _ => None,
        };
    }
    if !normalizer.is_null()
        || pre_tokenizer["type"] != "Metaspace"
        || pre_tokenizer["replacement"] != mark
        || pre_tokenizer["split"] != false
    {
        return None;
    }
    match pre_tokenizer["prepend_scheme"].as_str()? {
        "never" => Some(Prefix::Never),
        "always" => Some(Prefix::IfMissing),
        "first" => Some(Prefix::IfMissingAtStart),
        _ => None,
    }
}

/// Whether no merge of a BPE model joins a mark to what is before it, except for another mark: then
/// the ids of what is before a mark do not depend on what follows. A merge joins two tokens to one
/// of the vocabulary.
pub(super) fn is_cut(model: &EncoderModel) -> bool {
    let EncoderModel::Library(ModelWrapper::BPE(bpe)) = model else {
        return false;
    };
    let joins = |token: &String| token.trim_start_matches(MARK).contains(MARK);
    let vocab = bpe.get_vocab();
    !bpe.ignore_merges
        && bpe.continuing_subword_prefix.is_none()
        && bpe.end_of_word_suffix.is_none()
        // Otherwise unknown characters before it could be joined to it.
        && vocab.contains_key(&MARK.to_string())
        && !vocab.keys().any(joins)
}

/// The length of the first word: spaces and what follows up to the next ones.
pub(super) fn first_word(text: &str) -> usize {
    let is_space = |char: char| char == ' ' || char == MARK;
    let spaces = text.find(|char| !is_space(char)).unwrap_or(text.len());
    text[spaces..]
        .find(is_space)
        .map_or(text.len(), |end| spaces + end)
}

/// Whether a word ends between two parts of a text.
pub(super) fn is_limit(before: &str, after: &str) -> bool {
    let is_space = |char: char| char == ' ' || char == MARK;
    after.starts_with(is_space) && before.ends_with(|char| !is_space(char))
}

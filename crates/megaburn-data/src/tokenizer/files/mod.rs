//! The files that tokenizers are read from.

mod json;
mod sentencepiece;
mod tiktoken;
mod tiktoken_encodings;
mod wordpiece;

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use super::{encoder::Encoder, sentencepiece::SentencePieceModel, special::OwnIds};
use crate::error::DataError;

pub(super) use wordpiece::is_of_t5;

/// The names of the files that are looked for in a folder, in this order. A `*.tiktoken` comes
/// before the last one.
const NAMES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "vocab.txt",
];

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    /// Hugging Face's `tokenizer.json`.
    Json,
    /// A SentencePiece model.
    SentencePiece,
    /// A SentencePiece model to which T5's class adds sentinels, and eos at the end of each prompt.
    T5,
    /// A file of ranks of tiktoken.
    Tiktoken,
    /// BERT's `vocab.txt`.
    WordPiece,
}

/// A tokenizer without what the files next to it say about special tokens.
pub(super) struct Opened {
    pub(super) kind: FileKind,
    pub(super) encoder: Encoder,
    /// The special tokens that the file names.
    pub(super) own: OwnIds,
    /// What the files next to it change about the ids of a training text.
    pub(super) settings: String,
    /// The encoding of tiktoken.
    pub(super) encoding: Option<&'static str>,
}

/// The file for a path to it or to its folder.
pub(super) fn find(path: &Path) -> Result<PathBuf, DataError> {
    let none = |why: String| DataError::NoTokenizer {
        path: path.into(),
        why,
    };
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => none("no such file or folder".into()),
        _ => none(error.to_string()),
    })?;
    if !metadata.is_dir() {
        return Ok(path.into());
    }
    let (vocabulary, first) = (path.join(NAMES[4]), &NAMES[..4]);
    let mut files = first.iter().map(|name| path.join(name));
    if let Some(file) = files.find(|file| file.is_file()) {
        return Ok(file);
    }
    let entries = fs::read_dir(path).map_err(|error| none(error.to_string()))?;
    let mut ranks: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| has_ending(file, "tiktoken") && file.is_file())
        .collect();
    if let [first, second, ..] = &ranks[..] {
        let [first, second] = [first, second].map(|file| file.display());
        return Err(none(format!(
            "the folder has several, `{first}` and `{second}`; give one of them"
        )));
    }
    if let Some(file) = ranks.pop() {
        return Ok(file);
    }
    if vocabulary.is_file() {
        return Ok(vocabulary);
    }
    let why = if path.join("vocab.json").exists() {
        "the folder has only vocab.json; Python's \
         `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` writes a tokenizer.json"
            .into()
    } else {
        format!("the folder has none of {}, *.tiktoken", NAMES.join(", "))
    };
    Err(none(why))
}

/// Reads the tokenizer from a file with the content `bytes`.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Opened, DataError> {
    match kind(path, bytes) {
        FileKind::Json => json::read(path, bytes),
        FileKind::SentencePiece | FileKind::T5 => sentencepiece::read(path, bytes),
        FileKind::Tiktoken => tiktoken::read(path, bytes),
        FileKind::WordPiece => wordpiece::read(path, bytes),
    }
}

/// The format of a file. Its ending says it: `.model` is SentencePiece or, if the first line is one
/// of ranks, tiktoken; `.tiktoken` is tiktoken, `.txt` is WordPiece. With another ending, the
/// content says it, because a run keeps its copy of any of them as `tokenizer.json`.
fn kind(path: &Path, bytes: &[u8]) -> FileKind {
    let is_model = has_ending(path, "model");
    let is_json = !is_model && bytes.trim_ascii_start().starts_with(b"{");
    let mut lines = bytes.split(|&byte| byte == b'\n');
    if has_ending(path, "txt") {
        FileKind::WordPiece
    } else if is_json {
        FileKind::Json
    } else if has_ending(path, "tiktoken") || tiktoken::is_rank_file(bytes) {
        FileKind::Tiktoken
    } else if is_model || bytes.starts_with(&[SentencePieceModel::FIRST_BYTE]) {
        FileKind::SentencePiece
    } else if lines.any(|line| line.trim_ascii_end() == b"[UNK]") {
        FileKind::WordPiece
    } else {
        FileKind::Json
    }
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|found| found == ending)
}

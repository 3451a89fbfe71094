//! The small files of a Hugging Face model that hold no weights (configuration, tokenizer). They
//! are copied with the model into checkpoints and runs, and back.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{Checkpoint, hf::SMALL_FILES};
use serde_json::{Map, Value};

use crate::error::ModelError;
pub use megaburn_checkpoint::hf::ASSETS;

/// Marker file: the names of the model's tensors lack the family's prefix, and an export omits it
/// too. The marker is never exported.
pub(crate) const BARE_NAMES: &str = "bare-names";

/// The files that hold a tokenizer, in the order in which they are looked for.
const TOKENIZERS: [&str; 5] = [
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "vocab.txt",
];
/// Files from which a `tokenizer.json` was made.
const OF_JSON: [&str; 2] = ["vocab.json", "merges.txt"];

/// The small files of a model, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assets {
    files: Vec<(String, Vec<u8>)>,
}

impl Assets {
    /// The folder that holds the small files of a checkpoint, or of the run that it is in.
    pub(crate) fn folder_of(checkpoint: &Checkpoint) -> Option<PathBuf> {
        let own = checkpoint.path().join(ASSETS);
        let of_run = checkpoint
            .path()
            .parent()?
            .parent()
            .map(|run| run.join(ASSETS));
        [Some(own), of_run]
            .into_iter()
            .flatten()
            .find(|folder| folder.is_dir())
    }

    /// Whether a checkpoint's tensors were imported without the prefix of their names.
    pub(crate) fn has_bare_names(checkpoint: &Checkpoint) -> bool {
        Self::folder_of(checkpoint).is_some_and(|folder| folder.join(BARE_NAMES).is_file())
    }

    /// Whether a file of this name belongs to the small files that a checkpoint or a run keeps.
    pub fn is_kept_name(name: &str) -> bool {
        SMALL_FILES.contains(&name) || name == BARE_NAMES
    }

    /// Reads the small files in a folder.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let mut files = Vec::new();
        for name in SMALL_FILES.into_iter().chain([BARE_NAMES]) {
            let path = folder.join(name);
            if !path.is_file() {
                continue;
            }
            let bytes = fs::read(&path);
            let bytes = bytes.map_err(|error| ModelError::File {
                path,
                why: error.to_string(),
            })?;
            files.push((name.to_string(), bytes));
        }
        Ok(Self { files })
    }

    /// Names and contents of the files, for a checkpoint or a run.
    pub fn kept(&self) -> Vec<(String, Vec<u8>)> {
        self.files.clone()
    }

    /// Names and contents of the files, for an export.
    pub fn published(&self) -> Vec<(String, Vec<u8>)> {
        let files = self.files.iter().filter(|(name, _)| name != BARE_NAMES);
        files
            .map(|(name, bytes)| match name == TOKENIZERS[0] {
                true => (format_of(bytes).into(), bytes.clone()),
                false => (name.clone(), bytes.clone()),
            })
            .collect()
    }

    /// Whether one of the files that hold a tokenizer has this content.
    pub fn has_tokenizer(&self, content: &[u8]) -> bool {
        let mut files = self.files.iter();
        files.any(|(name, bytes)| TOKENIZERS.contains(&name.as_str()) && bytes == content)
    }

    /// Makes a file the tokenizer under the name `name`, with these entries of
    /// `tokenizer_config.json`. Other files that hold a tokenizer stay only next to a
    /// `tokenizer.json`, which is found before them.
    pub fn insert_tokenizer(&mut self, name: &str, bytes: Vec<u8>, config: &Map<String, Value>) {
        if name != TOKENIZERS[0] {
            let is_other = |name: &str| TOKENIZERS.contains(&name) || OF_JSON.contains(&name);
            self.files.retain(|(name, _)| !is_other(name));
        }
        self.insert(name, bytes);
        if !config.is_empty() {
            let file = "tokenizer_config.json";
            let said = self.json(file).filter(Value::is_object);
            let mut said = said.unwrap_or_else(|| Value::Object(Map::new()));
            for (key, value) in config {
                said[key] = value.clone();
            }
            self.insert(file, format!("{said:#}\n").into_bytes());
        }
    }

    /// Replaces the tokenizer files by those of `other`, which may have none.
    pub fn with_tokenizer_of(mut self, other: Self) -> Self {
        let others = ["config.json", "generation_config.json", BARE_NAMES];
        let of_tokenizer = |(name, _): &(String, Vec<u8>)| !others.contains(&name.as_str());
        self.files.retain(|file| !of_tokenizer(file));
        self.files
            .extend(other.files.into_iter().filter(of_tokenizer));
        self
    }

    /// The content of the file `name`.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.files
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, bytes)| bytes.as_slice())
    }

    /// Sets special tokens by their kind, such as `eos`, in `generation_config.json`, and in
    /// `config.json` if it exists.
    pub fn set_special_tokens(&mut self, tokens: &[(&str, Option<u32>)]) {
        for name in ["generation_config.json", "config.json"] {
            let json = self.json(name).filter(Value::is_object);
            let Some(mut json) =
                json.or((name != "config.json").then(|| Value::Object(Map::new())))
            else {
                continue;
            };
            for (kind, id) in tokens {
                json[format!("{kind}_token_id")] = (*id).into();
            }
            self.insert(name, format!("{json:#}\n").into_bytes());
        }
    }

    /// The content of the file `name`, parsed as JSON.
    pub fn json(&self, name: &str) -> Option<Value> {
        serde_json::from_slice(self.get(name)?).ok()
    }

    /// Adds a file, or replaces the file of the same name.
    pub fn insert(&mut self, name: &str, bytes: Vec<u8>) {
        self.files.retain(|(found, _)| found != name);
        self.files.push((name.to_string(), bytes));
    }

    /// The tokens that end a text, from `generation_config.json`, else from `config.json`.
    pub fn eos(&self) -> Vec<u32> {
        self.token_ids("eos_token_id").unwrap_or_default()
    }

    /// The token that starts the text of a decoder that follows an encoder, from
    /// `generation_config.json`, else from `config.json`; the padding if there is no such token there.
    pub fn decoder_start(&self) -> Option<u32> {
        let ids = self
            .token_ids("decoder_start_token_id")
            .or_else(|| self.token_ids("pad_token_id"));
        ids?.first().copied()
    }

    /// The tokens at a key of `generation_config.json`, else of `config.json`.
    fn token_ids(&self, key: &str) -> Option<Vec<u32>> {
        let of = |name| {
            let json = self.json(name)?;
            let ids = match &json[key] {
                Value::Array(ids) => ids.clone(),
                Value::Null => return None,
                id => vec![id.clone()],
            };
            let ids = ids.iter().filter_map(Value::as_u64);
            Some(ids.filter_map(|id| id.try_into().ok()).collect())
        };
        of("generation_config.json").or_else(|| of("config.json"))
    }
}

/// The name of a tokenizer file, by its content. Older versions kept any tokenizer of a run as
/// `tokenizer.json`.
fn format_of(bytes: &[u8]) -> &'static str {
    /// The key of the first field of a SentencePiece model, which is a protocol buffer.
    const FIRST_FIELD: u8 = 0x0A;
    let mut lines = bytes.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    match bytes.first() {
        Some(&FIRST_FIELD) => "tokenizer.model",
        _ if bytes.trim_ascii_start().starts_with(b"{") => "tokenizer.json",
        _ if lines.any(|line| line == b"[UNK]") => "vocab.txt",
        _ => "tiktoken.model",
    }
}

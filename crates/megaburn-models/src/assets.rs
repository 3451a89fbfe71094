//! The small files of a Hugging Face model that are no weights: they travel with it into checkpoints
//! and runs, and back.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{Checkpoint, hf::SMALL_FILES};
use serde_json::{Map, Value};

use crate::{ModelError, source::ModelSource};
pub use megaburn_checkpoint::hf::ASSETS;

/// Stands among them where the model's tensors came without the prefix of their names, so that they
/// go without it too. It is never published.
const BARE_NAMES: &str = "bare-names";

/// The small files of a model, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assets {
    files: Vec<(String, Vec<u8>)>,
}

impl Assets {
    /// Those of an opened model; a checkpoint inside a run has the run's.
    ///
    /// # Errors
    /// One that cannot be read.
    pub fn of(source: &ModelSource) -> Result<Self, ModelError> {
        let folder = Self::folder(source);
        let mut assets =
            folder.map_or_else(|| Ok(Self::default()), |folder| Self::read(&folder))?;
        if source.has_bare_names() {
            assets.insert(BARE_NAMES, Vec::new());
        }
        Ok(assets)
    }

    /// The folder that holds those of an opened model, if there is one.
    pub fn folder(source: &ModelSource) -> Option<PathBuf> {
        match source.checkpoint() {
            Some(checkpoint) => Self::folder_of(checkpoint),
            None => Some(source.path().into()),
        }
    }

    fn folder_of(checkpoint: &Checkpoint) -> Option<PathBuf> {
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

    /// Whether a checkpoint's tensors came without the prefix of their names.
    pub(crate) fn has_bare_names(checkpoint: &Checkpoint) -> bool {
        Self::folder_of(checkpoint).is_some_and(|folder| folder.join(BARE_NAMES).is_file())
    }

    /// Whether a checkpoint or a run keeps a file of this name among its model's small files.
    pub fn is_kept_name(name: &str) -> bool {
        SMALL_FILES.contains(&name) || name == BARE_NAMES
    }

    /// Those in a folder.
    ///
    /// # Errors
    /// One that cannot be read.
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

    /// The files' names and contents as a checkpoint or a run keeps them.
    pub fn kept(&self) -> Vec<(String, Vec<u8>)> {
        self.files.clone()
    }

    /// The files' names and contents as they are published.
    pub fn published(&self) -> Vec<(String, Vec<u8>)> {
        self.files
            .iter()
            .filter(|(name, _)| name != BARE_NAMES)
            .cloned()
            .collect()
    }

    /// The same with the tokenizer of `other`, which may be none.
    pub fn with_tokenizer_of(mut self, other: Self) -> Self {
        let others = ["config.json", "generation_config.json", BARE_NAMES];
        let of_tokenizer = |(name, _): &(String, Vec<u8>)| !others.contains(&name.as_str());
        self.files.retain(|file| !of_tokenizer(file));
        self.files
            .extend(other.files.into_iter().filter(of_tokenizer));
        self
    }

    /// The bytes of a file.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.files
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, bytes)| bytes.as_slice())
    }

    /// Says in `generation_config.json`, and in `config.json` where there is one, which tokens end a
    /// text, start one and fill one.
    pub fn set_special_tokens(&mut self, eos: Option<u32>, bos: Option<u32>, pad: Option<u32>) {
        for name in ["generation_config.json", "config.json"] {
            let json = self.json(name).filter(Value::is_object);
            let Some(mut json) =
                json.or((name != "config.json").then(|| Value::Object(Map::new())))
            else {
                continue;
            };
            for (kind, id) in [("eos", eos), ("bos", bos), ("pad", pad)] {
                json[format!("{kind}_token_id")] = id.into();
            }
            self.insert(name, format!("{json:#}\n").into_bytes());
        }
    }

    /// A file that is JSON.
    pub fn json(&self, name: &str) -> Option<Value> {
        serde_json::from_slice(self.get(name)?).ok()
    }

    /// Puts a file in, in place of one of the same name.
    pub fn insert(&mut self, name: &str, bytes: Vec<u8>) {
        self.files.retain(|(found, _)| found != name);
        self.files.push((name.to_string(), bytes));
    }

    /// The tokens that end a text: of `generation_config.json`, else of `config.json`.
    pub fn eos(&self) -> Vec<u32> {
        let of = |name| {
            let json = self.json(name)?;
            let ids = match &json["eos_token_id"] {
                Value::Array(ids) => ids.clone(),
                Value::Null => return None,
                id => vec![id.clone()],
            };
            Some(
                ids.iter()
                    .filter_map(Value::as_u64)
                    .filter_map(|id| id.try_into().ok())
                    .collect(),
            )
        };
        of("generation_config.json")
            .or_else(|| of("config.json"))
            .unwrap_or_default()
    }
}

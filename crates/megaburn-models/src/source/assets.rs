//! The small files of an opened model.

use std::path::PathBuf;

use super::ModelSource;
use crate::{
    assets::{ASSETS, Assets, BARE_NAMES},
    error::ModelError,
};

impl Assets {
    /// The small files of an opened model. A checkpoint inside a run uses those of the run.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn of(source: &ModelSource) -> Result<Self, ModelError> {
        let folder = Self::folder(source);
        let mut assets =
            folder.map_or_else(|| Ok(Self::default()), |folder| Self::read(&folder))?;
        if let Some(dir) = source.hf_dir()
            && assets.json("config.json").as_ref() != Some(dir.config())
        {
            // Only a part of it was in the folder.
            assets.insert("config.json", format!("{:#}\n", dir.config()).into_bytes());
        }
        if source.has_bare_names() {
            assets.insert(BARE_NAMES, Vec::new());
        }
        Ok(assets)
    }

    /// The small files of an opened model, as files of a checkpoint: paths in it, and contents.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn for_checkpoint(source: &ModelSource) -> Result<Vec<(String, Vec<u8>)>, ModelError> {
        let files = Self::of(source)?.kept().into_iter();
        Ok(files
            .map(|(name, file)| (format!("{ASSETS}/{name}"), file))
            .collect())
    }

    /// The folder that holds the small files of an opened model, if there is one.
    pub fn folder(source: &ModelSource) -> Option<PathBuf> {
        match source.checkpoint() {
            Some(checkpoint) => Self::folder_of(checkpoint),
            None => Some(source.path().into()),
        }
    }
}

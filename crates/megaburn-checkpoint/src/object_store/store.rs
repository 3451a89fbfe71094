use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use megaburn_store::{ObjectFolder, Obstacle, StoreConfig, open_folder};

use super::stored::StoredCheckpoint;
use crate::{
    checkpoint::check_manifest,
    error::CheckpointError,
    folder::step_name,
    inventory::{CheckpointState, ListedCheckpoint},
    manifest::{MANIFEST, MANIFEST_HASH, Manifest},
};

/// The most bytes of a manifest: 100,000 files of 1,000 pieces each have fewer.
const MAX_MANIFEST: u64 = 16 << 30;

/// A folder of checkpoints in an object store.
#[derive(Clone, Debug)]
pub struct CheckpointStore {
    pub(crate) folder: Arc<dyn ObjectFolder>,
}

impl CheckpointStore {
    /// Opens the folder at a URL, `s3://bucket/folder`, `gs://bucket/folder` or `file:///folder`.
    /// Nothing is requested.
    ///
    /// # Errors
    /// The URL or its settings cannot be used, or the build has no object stores.
    pub fn open(url: &str, config: &StoreConfig) -> Result<Self, CheckpointError> {
        let folder = open_folder(url, "a folder of checkpoints", config)?;
        Ok(Self::new(folder))
    }

    /// The checkpoints in a folder of objects.
    pub fn new(folder: Arc<dyn ObjectFolder>) -> Self {
        Self { folder }
    }

    /// The URL of the folder.
    pub fn url(&self) -> &str {
        self.folder.url()
    }

    /// The URL of the checkpoint of a step.
    pub fn url_of(&self, step: u64) -> String {
        format!("{}/{}", self.url(), step_name(step))
    }

    /// The checkpoints, oldest first, and what uploads and deletions have left.
    ///
    /// # Errors
    /// The folder cannot be listed. One that does not exist holds no checkpoints.
    pub fn list(&self) -> Result<Vec<StoredCheckpoint>, CheckpointError> {
        Ok(StoredCheckpoint::all(self.folder.list()?))
    }

    /// Reads and checks the manifest of a checkpoint.
    ///
    /// # Errors
    /// It is missing or damaged, cannot be read, or is of another version.
    pub fn manifest(&self, step: u64) -> Result<Manifest, CheckpointError> {
        Ok(self.manifest_and_text(step)?.0)
    }

    /// As [`manifest`](Self::manifest), with its text.
    pub(crate) fn manifest_and_text(
        &self,
        step: u64,
    ) -> Result<(Manifest, String), CheckpointError> {
        let folder = step_name(step);
        let read = |name: &str| self.folder.read(&format!("{folder}/{name}"), MAX_MANIFEST);
        let text = read(MANIFEST)?;
        let path = PathBuf::from(format!("{}/{MANIFEST}", self.url_of(step)));
        let manifest = check_manifest(&path, &text, |_| {
            let hash = read(MANIFEST_HASH)?;
            Ok(Some(String::from_utf8_lossy(&hash).into_owned()))
        })?;
        let damaged = |_| CheckpointError::damaged(&path, "it is not UTF-8");
        Ok((manifest, String::from_utf8(text).map_err(damaged)?))
    }

    /// Looks at a checkpoint: its manifest, and whether its objects have their full sizes. Nothing
    /// else is read.
    pub fn look(&self, stored: &StoredCheckpoint) -> ListedCheckpoint {
        let state = match self.manifest(stored.step) {
            _ if !stored.is_complete() => Err(CheckpointState::Unfinished),
            Ok(manifest) => match first_fault(stored, &manifest) {
                None => Ok(manifest),
                Some(why) => Err(CheckpointState::Damaged(why)),
            },
            Err(error) if error.is_damage() => Err(CheckpointState::Damaged(error.to_string())),
            Err(error) => Err(CheckpointState::Unreadable(error.to_string())),
        };
        let (state, manifest) = match state {
            Ok(manifest) => (CheckpointState::Whole, Some(manifest)),
            Err(state) => (state, None),
        };
        ListedCheckpoint {
            path: self.url_of(stored.step).into(),
            step: Some(stored.step),
            state,
            manifest,
            num_bytes: stored.num_bytes(),
            saved: stored.saved(),
        }
    }

    /// The manifest of a checkpoint that is complete and whose objects have their full sizes; `None`
    /// of another one.
    ///
    /// # Errors
    /// Its manifest cannot be read, which says nothing about the checkpoint.
    pub(crate) fn whole_manifest(
        &self,
        stored: &StoredCheckpoint,
    ) -> Result<Option<Manifest>, CheckpointError> {
        if !stored.is_complete() {
            return Ok(None);
        }
        match self.manifest(stored.step) {
            Ok(manifest) => {
                let is_whole = first_fault(stored, &manifest).is_none();
                Ok(is_whole.then_some(manifest))
            }
            Err(CheckpointError::Store(error)) if error.obstacle() == Obstacle::Missing => Ok(None),
            Err(error) if error.is_damage() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The runs to which a checkpoint belongs: those that have marked it. A complete one without a
    /// mark, such as a copy from another store, belongs to the run that its manifest names.
    ///
    /// # Errors
    /// It is complete and has no mark, and its manifest names no run or cannot be read.
    pub fn runs_of(&self, stored: &StoredCheckpoint) -> Result<BTreeSet<String>, CheckpointError> {
        let marks: BTreeSet<String> = stored.marks().map(String::from).collect();
        if !marks.is_empty() || !stored.is_complete() {
            return Ok(marks);
        }
        let unowned = |why: String| CheckpointError::StoreUnowned {
            url: self.url_of(stored.step),
            why,
        };
        match self.manifest(stored.step) {
            Ok(manifest) => match manifest.run_id {
                Some(id) => Ok([id].into()),
                None => Err(unowned("its manifest names no run".into())),
            },
            Err(error) if error.is_damage() => Err(unowned(error.to_string())),
            Err(error) => Err(error),
        }
    }
}

/// The first file of a checkpoint that is missing or has another size than its manifest says.
pub(crate) fn first_fault(stored: &StoredCheckpoint, manifest: &Manifest) -> Option<String> {
    manifest
        .files
        .iter()
        .find_map(|file| match stored.object(&file.name) {
            None => Some(format!("{} is missing", file.name)),
            Some(found) if found.num_bytes != file.bytes => {
                let found = found.num_bytes;
                Some(format!(
                    "{}: it has {found} bytes of {}",
                    file.name, file.bytes
                ))
            }
            Some(_) => None,
        })
}

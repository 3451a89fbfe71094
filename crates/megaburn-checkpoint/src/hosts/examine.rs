//! The files of a checkpoint that a host has.

use std::{collections::BTreeSet, path::Path};

use megaburn_collective::Progress;
use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::{Checkpoint, manifest_hash},
    error::CheckpointError,
    fault::{Fault, retried},
};

/// A rank's findings in the folder of its host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct HostCopy {
    /// The hash of the manifest, if there is an intact one.
    pub(crate) manifest: Option<String>,
    /// The names of all files of the checkpoint, on the host's first rank.
    pub(crate) files: Vec<String>,
    /// Files that are on this host, each read and intact.
    pub(crate) whole: BTreeSet<String>,
    /// The errors of damaged files.
    pub(crate) damage: Vec<String>,
    /// The errors of files that the system failed to read; they may be intact.
    pub(crate) unreadable: Vec<String>,
}

/// Examines every `count`th file of a host's copy of a checkpoint, from file `index` on.
///
/// # Errors
/// Another version wrote the checkpoint.
pub(crate) fn examine_copy(
    path: &Path,
    (index, count): (usize, usize),
    progress: &Progress,
) -> Result<HostCopy, CheckpointError> {
    let mut found = HostCopy::default();
    let checkpoint = match retried(|| Checkpoint::open_copy(path)) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            found.note(error)?;
            return Ok(found);
        }
    };
    match retried(|| manifest_hash(path)) {
        Ok(hash) => found.manifest = Some(hash),
        Err(error) => {
            found.note(error)?;
            return Ok(found);
        }
    }
    let names: Vec<_> = checkpoint
        .manifest
        .files
        .iter()
        .map(|file| &file.name)
        .collect();
    for file in (index..names.len()).step_by(count) {
        match retried(|| checkpoint.verify_files([file], progress)) {
            Ok(()) => {
                found.whole.insert(names[file].clone());
            }
            Err(error) => found.note(error)?,
        }
    }
    if index == 0 {
        found.files = names.into_iter().cloned().collect();
    }
    Ok(found)
}

impl HostCopy {
    /// Records damage. A missing file is not recorded, because another host may have it.
    fn note(&mut self, error: CheckpointError) -> Result<(), CheckpointError> {
        match Fault::of(&error) {
            Fault::Missing => {}
            Fault::Damaged => self.damage.push(error.to_string()),
            Fault::Unreadable => self.unreadable.push(error.to_string()),
            Fault::OtherVersion => return Err(error),
        }
        Ok(())
    }
}

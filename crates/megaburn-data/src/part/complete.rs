//! Data sets that are complete and have to be renamed.

use std::path::PathBuf;

use serde_json::Value;

use super::{
    disk::{self, folder_of, sync_folder},
    folder::LockedFolder,
    owned::{check_paths, description_path},
};
use crate::{error::DataError, indexed::with_ending};

/// Complete data sets in their folder.
#[derive(Debug)]
pub(crate) struct CompletePart {
    folder: LockedFolder,
    outputs: Vec<CompleteOutput>,
    progress: Value,
    force: bool,
}

/// A complete data set.
#[derive(Debug)]
pub(super) struct CompleteOutput {
    /// Its path without endings.
    prefix: PathBuf,
    /// Its files in the folder without their endings.
    stem: PathBuf,
}

impl CompleteOutput {
    pub(super) fn new(prefix: PathBuf, stem: PathBuf) -> Self {
        Self { prefix, stem }
    }

    /// The files that are not renamed yet with their names. The index is last: without it, tokens
    /// are no data set.
    fn left(&self) -> Vec<(PathBuf, PathBuf)> {
        let names = [
            ("bin", with_ending(&self.prefix, ".bin")),
            ("megaburn", description_path(&self.prefix)),
            ("idx", with_ending(&self.prefix, ".idx")),
        ];
        let from = names.map(|(ending, to)| (self.stem.with_extension(ending), to));
        from.into_iter().filter(|(from, _)| from.exists()).collect()
    }

    fn commit(&self, force: bool) -> Result<(), DataError> {
        let left = self.left();
        // A data set that is replaced is none from here on.
        if let (Some((_, index)), true) = (left.last(), force) {
            disk::remove(index)?;
        }
        for (from, to) in &left {
            check_paths([to.clone()], &self.prefix, force)?;
            disk::rename(from, to)?;
        }
        sync_folder(folder_of(&self.prefix))
    }
}

impl CompletePart {
    pub(super) fn new(
        folder: LockedFolder,
        outputs: Vec<CompleteOutput>,
        progress: Value,
        force: bool,
    ) -> Self {
        Self {
            folder,
            outputs,
            progress,
            force,
        }
    }

    /// What the caller saved last.
    pub(crate) fn progress(&self) -> &Value {
        &self.progress
    }

    /// Gives the data sets their names and removes the folder.
    ///
    /// # Errors
    /// A file of such a name was created in the meantime, or a file cannot be renamed.
    pub(crate) fn commit(&self) -> Result<(), DataError> {
        for output in &self.outputs {
            let names = output.left().into_iter().map(|(_, to)| to);
            check_paths(names, &output.prefix, self.force)?;
        }
        for output in &self.outputs {
            output.commit(self.force)?;
        }
        // An error of the removal is ignored: the data sets are complete.
        let _ = self.folder.remove();
        Ok(())
    }
}

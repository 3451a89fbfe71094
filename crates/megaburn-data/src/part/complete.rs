//! Data sets that are complete and have to be renamed.

use std::path::PathBuf;

use serde_json::Value;

use super::{
    disk::{self, folder_of, sync_folder},
    folder::LockedFolder,
    owned::{check_replaceable, description, description_path, is_owned, remove},
};
use crate::{error::DataError, indexed::with_ending};

/// Complete data sets in their folder.
#[derive(Debug)]
pub(crate) struct CompletePart {
    folder: LockedFolder,
    outputs: Vec<CompleteOutput>,
    progress: Value,
    force: bool,
    /// Prefixes of data sets of an earlier call that must not stay.
    superseded: Vec<PathBuf>,
}

/// A complete data set.
#[derive(Debug)]
pub(super) struct CompleteOutput {
    /// Its path without endings.
    prefix: PathBuf,
    /// Its files in the folder without their endings.
    stem: PathBuf,
}

/// A file with the name that it gets.
#[derive(Debug)]
struct Renamed {
    from: PathBuf,
    to: PathBuf,
}

impl CompleteOutput {
    pub(super) fn new(prefix: PathBuf, stem: PathBuf) -> Self {
        Self { prefix, stem }
    }

    /// The files in the order in which they are renamed. The description is first, because it shows
    /// whose the others are; the index is last: without it, tokens are no data set.
    fn files(&self) -> [Renamed; 3] {
        let names = [
            ("megaburn", description_path(&self.prefix)),
            ("bin", with_ending(&self.prefix, ".bin")),
            ("idx", with_ending(&self.prefix, ".idx")),
        ];
        names.map(|(ending, to)| Renamed {
            from: self.stem.with_extension(ending),
            to,
        })
    }

    /// The files that are not renamed yet.
    fn left(&self) -> Vec<Renamed> {
        let files = self.files().into_iter();
        files.filter(|file| file.from.exists()).collect()
    }

    /// Whether each file is in the folder or has its name. Those with names must be the ones that
    /// were in the folder.
    pub(super) fn is_whole(&self) -> bool {
        let mut files = self.files().into_iter();
        if !files.all(|file| file.from.exists() || file.to.exists()) {
            return false;
        }
        let num_left = self.left().len();
        num_left == self.files().len()
            || (num_left == 0 && description(&self.prefix).is_some())
            || (num_left > 0 && is_owned(&self.prefix))
    }

    /// Checks that the names are free, or may become free.
    fn check(&self, force: bool) -> Result<(), DataError> {
        let left = self.left();
        if left.len() == self.files().len() {
            return check_replaceable(&self.prefix, force);
        }
        // What has the names of the others is of this process, or of the one before it.
        match left
            .into_iter()
            .find(|file| file.to.symlink_metadata().is_ok())
        {
            Some(Renamed { to: path, .. }) => Err(DataError::Exists { path }),
            None => Ok(()),
        }
    }

    fn commit(&self, force: bool) -> Result<(), DataError> {
        let left = self.left();
        if force && left.len() == self.files().len() {
            remove(&self.prefix)?;
        }
        for Renamed { from, to } in &left {
            if to.symlink_metadata().is_ok() {
                return Err(DataError::Exists { path: to.clone() });
            }
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
            superseded: Vec::new(),
        }
    }

    /// Data sets to remove before these get their names.
    pub(crate) fn with_superseded(self, superseded: Vec<PathBuf>) -> Self {
        Self { superseded, ..self }
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
            output.check(self.force)?;
        }
        for prefix in &self.superseded {
            check_replaceable(prefix, true)?;
        }
        // Those that this data set makes untrue are removed first, so that both never exist.
        for prefix in &self.superseded {
            remove(prefix)?;
        }
        for output in &self.outputs {
            output.commit(self.force)?;
        }
        // An error of the removal is ignored: the data sets are complete.
        let _ = self.folder.remove();
        Ok(())
    }
}

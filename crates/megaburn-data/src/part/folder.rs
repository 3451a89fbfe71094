//! The folder of unfinished data sets, locked by this process.

use std::fs;
use std::path::{Path, PathBuf};

use super::{
    disk::{self, sync_folder, written},
    journal::{JOURNAL, NEW_JOURNAL},
    lock::{FolderLock, lock_folder},
    output::Output,
};
use crate::error::DataError;

#[derive(Debug)]
pub(super) struct LockedFolder {
    path: PathBuf,
    /// Keeps the folder locked.
    _lock: FolderLock,
}

impl LockedFolder {
    /// Creates a folder, if it is missing, and locks it.
    ///
    /// # Errors
    /// Another process has locked it, or it cannot be created.
    pub(super) fn lock(path: PathBuf) -> Result<Self, DataError> {
        let busy = || {
            let folder = path.clone();
            Err(DataError::Busy { folder })
        };
        let _lock = lock_folder(&path, &mut { busy })?;
        Ok(Self { path, _lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn sync(&self) -> Result<(), DataError> {
        sync_folder(&self.path)
    }

    /// Whether there is more in the folder than a journal that was never begun.
    pub(super) fn has_other_than_new_journal(&self) -> Result<bool, DataError> {
        for entry in written(&self.path, fs::read_dir(&self.path))? {
            if written(&self.path, entry)?.file_name() != NEW_JOURNAL {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the files of unfinished data sets, the journal last: without it, the folder would
    /// not be recognised.
    pub(super) fn remove_contents(&self) -> Result<(), DataError> {
        for entry in written(&self.path, fs::read_dir(&self.path))? {
            let entry = written(&self.path, entry)?;
            if Output::is_name(&entry.file_name()) {
                disk::remove(&entry.path())?;
            }
        }
        disk::remove(&self.path.join(NEW_JOURNAL))?;
        disk::remove(&self.path.join(JOURNAL))
    }

    /// Removes the folder and the files of unfinished data sets in it.
    pub(super) fn remove(&self) -> Result<(), DataError> {
        self.remove_contents()?;
        disk::remove_folder(&self.path)
    }

    /// Removes the folder if there is nothing in it.
    pub(super) fn remove_if_empty(&self) {
        // An error is ignored: something is in it, or the error before it is the one to report.
        let _ = disk::remove_folder(&self.path);
    }
}

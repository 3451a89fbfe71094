//! The folder of unfinished data sets, locked by this process.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{
    disk::{self, folder_of, sync_folder, written},
    journal::{JOURNAL, NEW_JOURNAL},
    output::Output,
};
use crate::error::DataError;

#[derive(Debug)]
pub(super) struct LockedFolder {
    path: PathBuf,
    /// Keeps the folder locked.
    _lock: File,
}

impl LockedFolder {
    /// Creates a folder, if it is missing, and locks it.
    ///
    /// # Errors
    /// Another process has locked it, or it cannot be created.
    pub(super) fn lock(path: PathBuf) -> Result<Self, DataError> {
        loop {
            match fs::create_dir(&path) {
                Ok(()) => sync_folder(folder_of(&path))?,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return written(&path, Err(error)),
            }
            let lock = match File::open(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                lock => written(&path, lock)?,
            };
            if let Err(TryLockError::WouldBlock) = lock.try_lock() {
                return Err(DataError::Busy { folder: path });
            }
            // Some network file systems have no locks; then nothing keeps two processes apart.
            // A process that finished may have removed this folder before it was locked.
            let file = |metadata: Metadata| (metadata.dev(), metadata.ino());
            let locked = written(&path, lock.metadata().map(file))?;
            if fs::metadata(&path).is_ok_and(|metadata| file(metadata) == locked) {
                return Ok(Self { path, _lock: lock });
            }
        }
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
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_folder_that_is_locked_is_the_one_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.megaburn-part");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if let Ok(folder) = LockedFolder::lock(path.clone()) {
                            assert!(path.exists(), "another thread has removed it");
                            folder.remove().unwrap();
                        }
                    }
                });
            }
        });
    }
}

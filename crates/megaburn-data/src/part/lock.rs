//! Locks folders, so that one process at a time writes into them.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::disk::{folder_of, sync_folder, written};
use crate::error::DataError;

/// Keeps a folder locked until it is dropped.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: File,
    /// Some network file systems have no locks; then nothing keeps two processes apart.
    is_held: bool,
}

impl FolderLock {
    /// Whether no other process has the lock.
    pub(crate) fn is_held(&self) -> bool {
        self.is_held
    }
}

/// Creates the folder at `path`, if it is missing, and locks it. If another process has the lock,
/// `on_busy` is called and, unless it fails, the lock is waited for.
///
/// Another process may remove the folder before it is locked here; then the one that is at the path
/// by now is locked. What that process did before is to be looked at after this.
///
/// # Errors
/// The folder cannot be created or opened, or `on_busy` fails.
pub(crate) fn lock_folder(
    path: &Path,
    on_busy: &mut dyn FnMut() -> Result<(), DataError>,
) -> Result<FolderLock, DataError> {
    loop {
        if !path.is_dir() {
            match fs::create_dir_all(path) {
                // Another process has created the folder, and may have removed it again.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && !is_other(path) => {
                    continue;
                }
                created => written(path, created)?,
            }
            sync_folder(folder_of(path))?;
        }
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            file => written(path, file)?,
        };
        let is_held = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                on_busy()?;
                written(path, file.lock())?;
                true
            }
            Err(TryLockError::Error(_)) => false,
        };
        let place = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let locked = written(path, file.metadata().map(place))?;
        if fs::metadata(path).is_ok_and(|metadata| place(metadata) == locked) {
            let _file = file;
            return Ok(FolderLock { _file, is_held });
        }
    }
}

/// Whether something is at the path that is no folder.
fn is_other(path: &Path) -> bool {
    path.symlink_metadata()
        .is_ok_and(|metadata| !metadata.is_dir())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
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
                        let lock = lock_folder(&path, &mut || Ok(())).unwrap();
                        assert!(
                            lock.is_held() && path.exists(),
                            "another thread has removed it"
                        );
                        fs::remove_dir(&path).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_file_is_not_locked_as_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        fs::write(&path, "a").unwrap();
        let refusal = lock_folder(&path, &mut || Ok(())).unwrap_err().to_string();
        assert!(refusal.contains("cannot write"), "{refusal}");
    }

    #[test]
    fn a_process_that_waits_locks_the_folder_that_is_there_then() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache/index");
        let first = lock_folder(&path, &mut || Ok(())).unwrap();
        let (send, waits) = channel();
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                let lock = lock_folder(&path, &mut || {
                    send.send(()).unwrap();
                    Ok(())
                });
                assert!(path.exists());
                lock
            });
            waits.recv().unwrap();
            fs::remove_dir(&path).unwrap();
            drop(first);
            second.join().unwrap().unwrap();
        });
    }
}

use std::{
    fs::{self, File, TryLockError},
    path::Path,
};

use crate::TrainError;

/// Holds a run's folder, so that a second run in it is refused instead of mixing its files with
/// the first one's. The operating system lets go when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct RunLock {
    _file: File,
}

impl RunLock {
    /// Makes the folder and takes it.
    ///
    /// # Errors
    /// It cannot be made, or another process holds it.
    pub(crate) fn take(dir: &Path) -> Result<Self, TrainError> {
        let fail = |source| TrainError::RunDir { path: dir.to_path_buf(), source };
        fs::create_dir_all(dir).map_err(fail)?;
        let path = dir.join(".lock");
        let file = File::options().create(true).append(true).open(&path).map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(TrainError::RunDirInUse { path: dir.to_path_buf() });
            }
            // Some network file systems know no locks: the run goes on without.
            Err(TryLockError::Error(error)) => {
                tracing::warn!("`{}` cannot be locked: {error}", path.display());
            }
        }
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exit;

    #[test]
    fn a_folder_is_held_by_one_run_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a/b");
        let first = RunLock::take(&run).unwrap();
        let error = RunLock::take(&run).unwrap_err();
        assert!(error.to_string().contains("belongs to a run that is going on"), "{error}");
        drop(first);
        RunLock::take(&run).unwrap();
    }

    #[test]
    fn a_file_is_no_folder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "x").unwrap();
        let error = RunLock::take(&path).unwrap_err();
        assert!(error.to_string().contains("cannot be the run's folder"), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}

//! What other programs may ask about a run's folder, and how they keep runs out of it.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use super::{
    RunFolderError, config_of, lock,
    marker::Marker,
    names::{CHECKPOINTS, METRICS, STATE},
};

/// A run, as its folder shows it. Nothing in the folder is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunInfo {
    /// The run's id: 128 random bits in hexadecimal.
    pub run_id: String,
    /// The process in which the run is in progress; `None` if it is not in progress.
    pub holder: Option<String>,
}

impl RunInfo {
    /// The run in the folder `dir`; `None` if the folder has no `run.json`.
    ///
    /// # Errors
    /// `run.json` is damaged or cannot be read now.
    pub fn read(dir: &Path) -> Result<Option<Self>, RunFolderError> {
        let marker = Marker::read(dir)?;
        Ok(marker.map(|marker| Self {
            run_id: marker.run_id,
            holder: lock::holder(dir),
        }))
    }
}

/// The files in a run's folder that other programs read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPaths {
    /// The measurements, a JSON object a line.
    pub metrics: PathBuf,
    /// Whether the run is running, stopped, finished or failed.
    pub state: PathBuf,
    /// The resolved configuration.
    pub config: PathBuf,
}

impl RunPaths {
    /// The files of the run in the folder `dir`, whether they exist or not.
    pub fn of(dir: &Path) -> Self {
        Self {
            metrics: dir.join(METRICS),
            state: dir.join(STATE),
            config: config_of(dir),
        }
    }
}

/// The folder of a run that is not in progress, and that does not start while this is held.
#[derive(Debug)]
pub struct IdleRun {
    path: PathBuf,
    run_id: String,
    _lock: File,
}

impl IdleRun {
    /// Takes the folder `dir`. Only its lock file is created, if it does not exist.
    ///
    /// # Errors
    /// The folder is not a run's, or the run is in progress, or the file system has no locks.
    pub fn take(dir: &Path) -> Result<Self, RunFolderError> {
        let unmarked = || RunFolderError::Unmarked {
            path: dir.to_path_buf(),
        };
        // A folder that is not a run's gets no lock file.
        Marker::read(dir)?.ok_or_else(unmarked)?;
        let lock = lock::hold(dir)?;
        let marker = Marker::read(dir)?.ok_or_else(unmarked)?;
        Ok(Self {
            path: dir.to_path_buf(),
            run_id: marker.run_id,
            _lock: lock,
        })
    }

    /// The run's id: 128 random bits in hexadecimal.
    pub fn run_id(&self) -> &str {
        &self.run_id
    }

    /// The folder of the run's checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;
    use crate::{exit::Exit, run_folder::lock::RunLock};

    #[test]
    fn a_run_in_progress_is_seen_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        assert_eq!(RunInfo::read(here).unwrap(), None);
        let error = IdleRun::take(here).unwrap_err();
        assert!(error.to_string().contains("has no run.json"), "{error}");
        assert_eq!(
            fs::read_dir(here).unwrap().count(),
            0,
            "nothing was written"
        );

        let marker = Marker::new().unwrap();
        marker.write(here).unwrap();
        let mut lock = RunLock::take(here, Duration::ZERO).unwrap();
        lock.sign(&marker.run_id).unwrap();
        let found = RunInfo::read(here).unwrap().unwrap();
        assert_eq!(found.run_id, marker.run_id);
        let pid = format!("pid {}", std::process::id());
        assert!(found.holder.unwrap().ends_with(&pid));
        let error = IdleRun::take(here).unwrap_err();
        assert!(error.to_string().contains(&pid), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
        assert!(lock.is_in_place().unwrap().is_ok() && lock.is_signed_by_us().unwrap().is_ok());
    }

    #[test]
    fn no_run_starts_in_a_folder_that_is_held() {
        let dir = tempfile::tempdir().unwrap();
        let marker = Marker::new().unwrap();
        marker.write(dir.path()).unwrap();
        let text = "run 1f\nstart 2\nhost elsewhere pid 7\nmachine other\n";
        fs::write(dir.path().join(".lock"), text).unwrap();
        let idle = IdleRun::take(dir.path()).unwrap();
        assert_eq!(idle.run_id(), marker.run_id);
        assert_eq!(idle.checkpoints(), dir.path().join("checkpoints"));
        RunLock::take(dir.path(), Duration::ZERO).unwrap_err();
        IdleRun::take(dir.path()).unwrap_err();
        drop(idle);
        assert_eq!(RunInfo::read(dir.path()).unwrap().unwrap().holder, None);
        let kept = fs::read_to_string(dir.path().join(".lock")).unwrap();
        assert_eq!(kept, text, "the lock says what the last run wrote");
        RunLock::take(dir.path(), Duration::ZERO).unwrap();
    }
}

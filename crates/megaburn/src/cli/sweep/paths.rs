//! The files of a sweep.

use std::{fs, io, path::Path};

use megaburn_train::TrainError;

/// The folder of the outputs of all runs.
pub(super) const LOGS: &str = "logs";

/// The error of a write to `path`.
pub(super) fn failed_to_write(path: &Path) -> impl FnOnce(io::Error) -> TrainError {
    let path = path.to_path_buf();
    move |source| TrainError::Write { path, source }
}

/// Makes a folder and those above it.
pub(super) fn make(folder: &Path) -> Result<(), TrainError> {
    fs::create_dir_all(folder).map_err(failed_to_write(folder))
}

/// Replaces a file that an earlier start of the sweep may have written.
pub(super) fn write(path: &Path, text: &str) -> Result<(), TrainError> {
    fs::write(path, text).map_err(failed_to_write(path))
}

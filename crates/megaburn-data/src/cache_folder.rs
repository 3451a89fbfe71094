//! Folders of files that one process of a host writes and all read.
//!
//! The folder is locked by the process that writes. Files grow under temporary names and are
//! renamed when they are on the disk, so that a file with its name is complete.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{error::DataError, part::remove};

/// What stands before the process id in a temporary name.
pub(crate) const UNFINISHED: &str = ".unfinished-";

/// The folder of caches of this user: `$XDG_CACHE_HOME/megaburn`, or `~/.cache/megaburn`. `None` if
/// neither variable is set.
pub fn default_cache_dir() -> Option<PathBuf> {
    let of = |name| env::var_os(name).filter(|value| !value.is_empty());
    let caches = of("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(PathBuf::from(of("HOME")?).join(".cache")));
    Some(caches?.join("megaburn"))
}

/// Removes the files of a folder whose names `is_unfinished` accepts: what processes left that were
/// killed. The folder must be locked, so that no process writes.
///
/// # Errors
/// The folder cannot be read, or a file cannot be removed.
pub(crate) fn remove_unfinished(
    folder: &Path,
    is_unfinished: impl Fn(&str) -> bool,
) -> Result<(), DataError> {
    let unreadable = |source| DataError::Io {
        path: folder.into(),
        source,
    };
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        if entry.file_name().to_str().is_some_and(&is_unfinished) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Temporary names, and the names that the files get. What was not renamed is removed at the end.
#[derive(Debug, Default)]
pub(crate) struct Unfinished(pub(crate) Vec<(PathBuf, PathBuf)>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        for (temporary, _) in &self.0 {
            // An error of the removal is ignored: the error before it is the one to report.
            let _ = remove(temporary);
        }
    }
}

//! Tracks this process's folders in progress, so that a signal can end the process without leaving
//! them behind.

use std::{
    fs, mem,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    owner::{OWNER, unmark},
    paths::sibling_path,
};

/// A folder in progress, and the parent folders that were created for it, innermost first.
#[derive(Debug)]
struct Unfinished {
    path: PathBuf,
    made: Vec<PathBuf>,
}

/// A signal applies to the whole process, and so does this list.
static UNFINISHED: Mutex<Vec<Unfinished>> = Mutex::new(Vec::new());

fn list() -> MutexGuard<'static, Vec<Unfinished>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While this is held, a signal removes nothing.
#[derive(Debug)]
pub(crate) struct RemovalGuard(MutexGuard<'static, Vec<Unfinished>>);

impl RemovalGuard {
    pub(crate) fn new() -> Self {
        Self(list())
    }

    pub(crate) fn add(&mut self, path: &Path, made: &[PathBuf]) {
        self.0.push(Unfinished {
            path: path.to_path_buf(),
            made: made.to_vec(),
        });
    }

    pub(crate) fn forget(&mut self, path: &Path) {
        self.0.retain(|unfinished| unfinished.path != path);
    }
}

/// Removes everything that unfinished conversions of this process have written so far. Existing
/// contents of their targets are unchanged. Call it to end the process on a signal, from any
/// thread.
///
/// The process must then end: a conversion that keeps running blocks forever when it renames or
/// removes its result.
pub fn remove_unfinished() {
    let mut list = list();
    for Unfinished { path, made } in list.drain(..) {
        // After the rename, no other thread can write more files into it.
        let aside = sibling_path(&path, "-");
        let path = if fs::rename(&path, &aside).is_ok() {
            aside
        } else {
            path
        };
        remove_marked(&path);
        for made in made {
            // Fails if another process has put something into it.
            let _ = fs::remove_dir(made);
        }
    }
    // Keep the lock for good, so that no other thread renames or removes a folder before the
    // process ends.
    mem::forget(list);
}

/// Removes a folder, its mark last, so that the rest is still recognized if the removal is
/// interrupted. If `folder` is a link, only the link is removed.
pub(crate) fn remove_marked(folder: &Path) {
    let remove = || {
        if folder.is_symlink() {
            return fs::remove_file(folder);
        }
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name() == OWNER {
                continue;
            }
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?
            } else {
                fs::remove_file(entry.path())?
            }
        }
        // The folder may never have been marked.
        let _ = unmark(folder);
        fs::remove_dir(folder)
    };
    if let Err(error) = remove()
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}: {error}", folder.display());
    }
}

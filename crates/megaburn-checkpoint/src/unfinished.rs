//! Folders in the making of this process, so that a signal can end it without leaving them.

use std::{
    fs, mem,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    owner::{OWNER, unmark},
    paths::sibling_path,
};

/// A folder in the making, and the folders above it that were made for it, innermost first.
#[derive(Debug)]
struct Unfinished {
    path: PathBuf,
    made: Vec<PathBuf>,
}

/// A signal is for the whole process, and so is this list.
static UNFINISHED: Mutex<Vec<Unfinished>> = Mutex::new(Vec::new());

fn list() -> MutexGuard<'static, Vec<Unfinished>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it is held, nothing is removed on behalf of a signal.
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

/// Removes what conversions of this process have written so far and not finished. What stood at
/// their targets is untouched. Call it to end the process on a signal, from any thread.
///
/// Afterwards the process must end: a conversion that goes on waits for ever where it would put its
/// result in place, or remove it.
pub fn remove_unfinished() {
    let mut list = list();
    for Unfinished { path, made } in list.drain(..) {
        // Under another name nobody can write more into it.
        let aside = sibling_path(&path, "-");
        let path = if fs::rename(&path, &aside).is_ok() {
            aside
        } else {
            path
        };
        remove_marked(&path);
        for made in made {
            // Somebody else may have put something into it.
            let _ = fs::remove_dir(made);
        }
    }
    mem::forget(list);
}

/// Removes a folder, its mark last: if this is interrupted, the rest is still known. Of a link only the link
/// is removed.
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
        // It may never have been marked.
        let _ = unmark(folder);
        fs::remove_dir(folder)
    };
    if let Err(error) = remove()
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}: {error}", folder.display());
    }
}

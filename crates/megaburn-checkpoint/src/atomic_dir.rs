//! A folder that appears whole under its name or not at all.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use crate::{
    CheckpointError,
    error::IoContext,
    owner::{Mark, SetMark, unmark},
    paths::{REPLACED, TMP, is_there, parent, sibling_path, sync_folder},
    unfinished::{RemovalGuard, remove_marked},
};

/// A folder in the making beside the one that it will become; removed when dropped before its
/// commit.
#[derive(Debug)]
pub(crate) struct AtomicDir {
    pub(crate) path: PathBuf,
    target: PathBuf,
    /// Folders above it that were made for it, innermost first.
    made: Vec<PathBuf>,
    /// The mark in it, by which a later process knows that it may be removed.
    mark: Option<Mark>,
    committed: bool,
}

impl AtomicDir {
    /// For a folder that will stand at `target`, whose parents are made where they are missing.
    /// The ranks of a run write such folders together, and the run itself removes leftovers.
    pub(crate) fn create(target: &Path) -> Result<Self, CheckpointError> {
        Self::with_parents(target, Mark::of_run)
    }

    /// The same for a folder of this process alone: it is marked with its owner, and removed by
    /// [`remove_unfinished`](crate::remove_unfinished).
    pub(crate) fn create_owned(target: &Path) -> Result<Self, CheckpointError> {
        // A signal waits until the folder can be told for this process' own.
        let mut held = RemovalGuard::new();
        let staging = Self::with_parents(target, Mark::of_process)?;
        held.add(&staging.path, &staging.made);
        Ok(staging)
    }

    /// As [`create`](Self::create), in a folder that must be there already.
    pub(crate) fn inside(target: &Path) -> Result<Self, CheckpointError> {
        Self::make(target, Vec::new(), Mark::of_run)
    }

    fn with_parents(target: &Path, mark: SetMark) -> Result<Self, CheckpointError> {
        let is_missing = |above: &&Path| !above.as_os_str().is_empty() && !is_there(above);
        let made = parent(target).ancestors().take_while(is_missing);
        Self::make(target, made.map(Path::to_path_buf).collect(), mark)
    }

    fn make(target: &Path, made: Vec<PathBuf>, mark: SetMark) -> Result<Self, CheckpointError> {
        let path = sibling_path(target, TMP);
        let target = target.to_path_buf();
        let mut staging = Self {
            path,
            target,
            made,
            mark: None,
            committed: false,
        };
        if let Some(innermost) = staging.made.first() {
            fs::create_dir_all(innermost).during("make the folder", innermost)?;
        }
        fs::create_dir(&staging.path).during("make the folder", &staging.path)?;
        staging.mark = Some(mark(&staging.path).during("write into", &staging.path)?);
        Ok(staging)
    }

    /// Whether a signal may remove it.
    fn is_of_process(&self) -> bool {
        matches!(self.mark, Some(Mark::Process { .. }))
    }

    /// Gives it its final name; what stands there is replaced. From here on it is the result,
    /// whatever happens.
    ///
    /// # Errors
    /// It could not be put in place, and what stood there stands there still. Or
    /// [`CheckpointError::NotDurable`]: it is in place, and the disk may not know it.
    pub(crate) fn commit(mut self) -> Result<(), CheckpointError> {
        let target = self.target.clone();
        let mut held = self.is_of_process().then(RemovalGuard::new);
        let mark = if held.is_some() {
            Mark::of_process
        } else {
            Mark::of_run
        };
        let old = put_in_place(&self.path, &target, mark)?;
        self.committed = true;
        // If it stays, it is one small file more in the result, and the next start or conversion knows it.
        let _ = unmark(&target);
        let sync_above = |made: &PathBuf| sync_folder(parent(made));
        let synced = [&target]
            .into_iter()
            .chain(&self.made)
            .try_for_each(sync_above);
        if let (Some(old), Ok(())) = (old, &synced) {
            remove_marked(&old.path);
        }
        if let Some(held) = &mut held {
            held.forget(&self.path);
        }
        synced.map_err(|source| CheckpointError::NotDurable {
            path: target,
            source,
        })
    }
}

impl Drop for AtomicDir {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        let held = self.is_of_process().then(RemovalGuard::new);
        if is_there(&self.path) {
            remove_marked(&self.path);
        }
        if !self.is_of_process() && is_there(&self.path) {
            // Another host still writes into it: the next start of the run must know it.
            let _ = Mark::of_run(&self.path);
        }
        for made in &self.made {
            // Somebody else may have put something into it.
            let _ = fs::remove_dir(made);
        }
        if let Some(mut held) = held {
            held.forget(&self.path);
        }
    }
}

/// A result that another took the place of.
struct ReplacedDir {
    path: PathBuf,
    _mark: Option<Mark>,
}

/// Gives the folder at `path` the name `target`. What stands there is exchanged with it in one
/// step, so that the name is never empty; where the file system cannot do that, it is moved aside
/// first. It is marked, so that a later process knows it for a leftover.
fn put_in_place(
    path: &Path,
    target: &Path,
    mark: SetMark,
) -> Result<Option<ReplacedDir>, CheckpointError> {
    if !is_there(target) {
        fs::rename(path, target).during("rename", path)?;
        return Ok(None);
    }
    // Of a link only the link is replaced: what it points to is left as it is.
    let mark = if target.is_symlink() {
        None
    } else {
        mark(target).ok()
    };
    let not_marked = |error: CheckpointError, at: &Path| {
        if mark.is_some() {
            let _ = unmark(at);
        }
        error
    };
    let old = match exchange(path, target) {
        Ok(()) => path.to_path_buf(),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::Unsupported | ErrorKind::InvalidInput
            ) =>
        {
            let old = sibling_path(target, REPLACED);
            let aside = fs::rename(target, &old).during("move aside", target);
            aside.map_err(|error| not_marked(error, target))?;
            if let Err(error) = fs::rename(path, target).during("rename", path) {
                fs::rename(&old, target).during("restore", &old)?;
                return Err(not_marked(error, target));
            }
            old
        }
        Err(source) => {
            let action = "exchange with the new folder";
            let path = target.to_path_buf();
            return Err(not_marked(
                CheckpointError::Io {
                    action,
                    path,
                    source,
                },
                target,
            ));
        }
    };
    Ok(Some(ReplacedDir {
        path: old,
        _mark: mark,
    }))
}

/// Lets two folders change names in one step.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    Ok(renameat2(
        AT_FDCWD,
        a,
        AT_FDCWD,
        b,
        RenameFlags::RENAME_EXCHANGE,
    )?)
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;
    use crate::testing::names;

    #[test]
    fn an_uncommitted_folder_disappears_and_a_committed_one_replaces_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("step-00000003");
        drop(AtomicDir::create(&target).unwrap());
        assert_eq!(names(dir.path()), [""; 0]);
        for text in ["first", "second"] {
            let staging = AtomicDir::create(&target).unwrap();
            fs::write(staging.path.join("x"), text).unwrap();
            staging.commit().unwrap();
            assert_eq!(fs::read_to_string(target.join("x")).unwrap(), text);
            assert_eq!(names(dir.path()), ["step-00000003"]);
        }
    }

    #[test]
    fn folders_that_were_made_above_it_disappear_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a/b/out");
        drop(AtomicDir::create(&target).unwrap());
        assert_eq!(names(dir.path()), [""; 0]);
        AtomicDir::create(&target).unwrap().commit().unwrap();
        assert!(target.is_dir());
        drop(AtomicDir::create(&dir.path().join("a/c/out")).unwrap());
        assert_eq!(names(&dir.path().join("a")), ["b"]);
    }

    #[test]
    fn a_folder_that_cannot_be_put_in_place_leaves_what_stands_there() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("x"), "old").unwrap();
        let staging = AtomicDir::create_owned(&target).unwrap();
        fs::remove_dir_all(&staging.path).unwrap();
        let error = staging.commit().unwrap_err().to_string();
        assert!(
            error.contains("cannot exchange") && error.contains("out"),
            "{error}"
        );
        assert_eq!(names(dir.path()), ["out"]);
        assert_eq!(names(&target), ["x"]);
    }

    /// Never is there a moment without a folder at the target, and nothing but it stays.
    #[test]
    fn the_name_of_a_replaced_folder_is_never_empty() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        AtomicDir::create_owned(&target).unwrap().commit().unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut looks = 0;
                while !done.load(Ordering::Relaxed) {
                    assert!(target.is_dir(), "after {looks} looks");
                    looks += 1;
                }
                looks
            });
            for number in 0..40 {
                let staging = AtomicDir::create_owned(&target).unwrap();
                fs::write(staging.path.join("x"), number.to_string()).unwrap();
                staging.commit().unwrap();
                assert_eq!(
                    fs::read_to_string(target.join("x")).unwrap(),
                    number.to_string()
                );
            }
            done.store(true, Ordering::Relaxed);
            assert!(watch.join().unwrap() > 40);
        });
        assert_eq!(names(dir.path()), ["out"]);
        assert_eq!(names(&target), ["x"]);
    }
}

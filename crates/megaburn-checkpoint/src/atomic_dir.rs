//! A folder that appears complete under its name, or not at all.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use crate::{
    error::{CheckpointError, IoContext},
    owner::{Mark, SetMark, unmark},
    paths::{REPLACED, TMP, is_there, parent, sibling_path, sync_folder},
    unfinished::{RemovalGuard, remove_marked},
};

/// A folder in progress, in the same parent folder as its target. It is removed if it is dropped
/// before [`commit`](Self::commit).
#[derive(Debug)]
pub(crate) struct AtomicDir {
    pub(crate) path: PathBuf,
    target: PathBuf,
    /// Parent folders that were created for it, innermost first.
    made: Vec<PathBuf>,
    /// The mark inside it, which tells a later process that it may be removed.
    mark: Option<Mark>,
    committed: bool,
}

impl AtomicDir {
    /// Creates a folder that will be renamed to `target`; missing parents are created. The ranks of
    /// a run write such folders together, and the run itself removes leftovers.
    pub(crate) fn create(target: &Path) -> Result<Self, CheckpointError> {
        Self::with_parents(target, Mark::of_run)
    }

    /// Like [`create`](Self::create), for a folder that only this process writes. It is marked with
    /// its owner, and [`remove_unfinished`](crate::remove_unfinished) removes it.
    pub(crate) fn create_owned(target: &Path) -> Result<Self, CheckpointError> {
        // Holds off signals until the folder is registered as this process's own.
        let mut held = RemovalGuard::new();
        let staging = Self::with_parents(target, Mark::of_process)?;
        held.add(&staging.path, &staging.made);
        Ok(staging)
    }

    /// Like [`create`](Self::create), in a parent folder that must exist already.
    pub(crate) fn inside(target: &Path) -> Result<Self, CheckpointError> {
        Self::make(target, Vec::new(), Mark::of_run)
    }

    /// Like [`inside`](Self::inside), with this path before the commit.
    pub(crate) fn named(path: &Path, target: &Path) -> Result<Self, CheckpointError> {
        Self::make_at(path, target, Vec::new(), Mark::of_run)
    }

    fn with_parents(target: &Path, mark: SetMark) -> Result<Self, CheckpointError> {
        let is_missing = |above: &&Path| !above.as_os_str().is_empty() && !is_there(above);
        let made = parent(target).ancestors().take_while(is_missing);
        Self::make(target, made.map(Path::to_path_buf).collect(), mark)
    }

    fn make(target: &Path, made: Vec<PathBuf>, mark: SetMark) -> Result<Self, CheckpointError> {
        Self::make_at(&sibling_path(target, TMP), target, made, mark)
    }

    fn make_at(
        path: &Path,
        target: &Path,
        made: Vec<PathBuf>,
        mark: SetMark,
    ) -> Result<Self, CheckpointError> {
        let mut staging = Self {
            path: path.to_path_buf(),
            target: target.to_path_buf(),
            made,
            mark: None,
            committed: false,
        };
        if let Some(innermost) = staging.made.first() {
            fs::create_dir_all(innermost).during("create the folder", innermost)?;
        }
        fs::create_dir(&staging.path).during("create the folder", &staging.path)?;
        staging.mark = Some(mark(&staging.path).during("write into", &staging.path)?);
        Ok(staging)
    }

    /// Whether a signal handler may remove the folder.
    fn is_of_process(&self) -> bool {
        matches!(self.mark, Some(Mark::Process { .. }))
    }

    /// Renames the folder to its target and replaces what is there. After that the folder counts as
    /// the result, whatever happens.
    ///
    /// # Errors
    /// The folder could not be renamed, and what was at the target is still there. Or
    /// [`CheckpointError::NotDurable`]: it was renamed, but the rename may not have reached the
    /// disk.
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
        // If the mark cannot be removed, the result has one extra small file, which the next start
        // or conversion recognizes.
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
            // A rank on another host still writes into it, so the next start of the run must
            // recognize it.
            let _ = Mark::of_run(&self.path);
        }
        for made in &self.made {
            // Fails if another process has put something into the folder, which then stays.
            let _ = fs::remove_dir(made);
        }
        if let Some(mut held) = held {
            held.forget(&self.path);
        }
    }
}

/// A folder that was replaced by another.
struct ReplacedDir {
    path: PathBuf,
    _mark: Option<Mark>,
}

/// Renames the folder at `path` to `target`. If `target` exists, the two are exchanged in one step,
/// so that the name always exists. Where the file system cannot do that, the old folder is moved
/// aside first. The old folder is marked, so that a later process recognizes it as a leftover.
fn put_in_place(
    path: &Path,
    target: &Path,
    mark: SetMark,
) -> Result<Option<ReplacedDir>, CheckpointError> {
    if !is_there(target) {
        fs::rename(path, target).during("rename", path)?;
        return Ok(None);
    }
    // If the target is a link, only the link is replaced; what it points to is not touched.
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
            let action = "swap with the new folder";
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

/// Exchanges the names of two folders in one step.
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
            error.contains("cannot swap") && error.contains("out"),
            "{error}"
        );
        assert_eq!(names(dir.path()), ["out"]);
        assert_eq!(names(&target), ["x"]);
    }

    /// The target exists at every moment, and nothing else remains.
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

//! Removes the runs that `--fresh` set aside, once the new run has a checkpoint.
//!
//! The marker names a run that was set aside until it is removed. A removal that is interrupted, or
//! that fails, is continued after the next checkpoint or by the next start.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use megaburn_checkpoint::checkpoints_of;
use megaburn_collective::Progress;

use super::{
    RunFolder,
    aside::{clear, fail},
    marker::Marker,
    names::{CHECKPOINTS, MARKER, names_in},
    owned::{Owned, Proof},
};
use crate::error::TrainError;

/// The end of the removal of one folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discarded {
    /// The folder is gone.
    Gone,
    /// The folder holds other files, and they stay.
    HoldsOthers,
    /// The removal was asked to stop, or the folder of the run is no longer this run's.
    Interrupted,
}

impl RunFolder {
    /// Removes the runs that `--fresh` set aside, file by file, until `is_cancelled` is set. Each
    /// removed file counts as progress. Nothing is removed, and the marker is not written, where
    /// another run has taken the folder.
    pub(crate) fn discard_set_aside(&self, is_cancelled: &AtomicBool, progress: &Progress) {
        let mut is_changed = false;
        for name in self.set_aside_names() {
            if is_cancelled.load(Ordering::Relaxed) {
                break;
            }
            let folder = self.path.join(&name);
            let shown = folder.display();
            if let Err(why) = self.check_all() {
                tracing::warn!("`{shown}` was not removed: {why}");
                return;
            }
            let goes_on = || {
                progress.add(0);
                !is_cancelled.load(Ordering::Relaxed) && self.check().is_ok()
            };
            match discard(&folder, &goes_on) {
                Ok(Discarded::Gone) => {}
                Ok(Discarded::HoldsOthers) => {
                    tracing::warn!("`{shown}` was not removed: it contains other files");
                }
                Ok(Discarded::Interrupted) => break,
                Err(error) => {
                    tracing::warn!("cannot remove `{shown}`: {error}; the next start tries again");
                    continue;
                }
            }
            self.held().marker.set_aside.retain(|aside| *aside != name);
            is_changed = true;
        }
        if is_changed {
            self.write_marker();
        }
    }

    /// Writes the marker again, if the folder still belongs to this run.
    fn write_marker(&self) {
        let path = self.path.join(MARKER);
        let shown = path.display();
        if let Err(why) = self.check_all() {
            tracing::warn!("`{shown}` was not written: {why}");
        } else if let Err(error) = self.held().marker.write(&self.path) {
            tracing::warn!("cannot write `{shown}`: {error}");
        }
    }
}

/// Removes a folder with a run that was set aside: the files that the run wrote, and the folder
/// itself if nothing else is in it. `goes_on` is asked before each file.
fn discard(folder: &Path, goes_on: &dyn Fn() -> bool) -> Result<Discarded, TrainError> {
    let cleared = || match clear(folder).map_err(fail(folder))? {
        true => Ok(Discarded::Gone),
        false => Ok(Discarded::HoldsOthers),
    };
    let Some(marker) = Marker::read(folder)? else {
        return cleared();
    };
    for (_, checkpoint) in checkpoints_of(&folder.join(CHECKPOINTS), &marker.run_id)? {
        if !remove(&checkpoint, goes_on)? {
            return Ok(Discarded::Interrupted);
        }
    }
    for name in names_in(folder).map_err(fail(folder))? {
        let path = folder.join(&name);
        let owned = Owned::of(&name).filter(|owned| owned.name != MARKER && owned.is_ours(&path));
        let is_removed = match owned {
            Some(owned) if owned.proof == Proof::Mark => remove(&path, goes_on)?,
            Some(_) if !goes_on() => false,
            Some(_) => fs::remove_file(&path).map(|()| true).map_err(fail(&path))?,
            None => true,
        };
        if !is_removed {
            return Ok(Discarded::Interrupted);
        }
    }
    cleared()
}

/// Removes a folder and what is in it, as long as `goes_on` says so. A link is removed, and not
/// what it points to. Returns whether all is removed.
///
/// The last names are removed first: a checkpoint's manifest and the mark of other folders, which
/// say that a run wrote them, sort before the run's other files.
fn remove(path: &Path, goes_on: &dyn Fn() -> bool) -> Result<bool, TrainError> {
    if !goes_on() {
        return Ok(false);
    }
    let is_folder = !path.is_symlink() && path.is_dir();
    if !is_folder {
        return fs::remove_file(path).map(|()| true).map_err(fail(path));
    }
    for name in names_in(path).map_err(fail(path))?.iter().rev() {
        if !remove(&path.join(name), goes_on)? {
            return Ok(false);
        }
    }
    fs::remove_dir(path).map(|()| true).map_err(fail(path))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::run_folder::tests::{anew, discard_all, fill, folder, take};

    #[test]
    fn an_interrupted_removal_is_continued_whatever_is_gone() {
        let mut num_files = 0;
        loop {
            let dir = tempfile::tempdir().unwrap();
            let old = take(dir.path()).unwrap();
            folder(&old).write_config("[run]\n").unwrap();
            fill(dir.path(), 7, &old.id);
            fill(dir.path(), 9, &old.id);
            let new = anew(old, dir.path());
            let aside = folder(&new).set_aside().remove(0);
            let asked = Cell::new(0);
            let goes_on = || {
                asked.set(asked.get() + 1);
                asked.get() <= num_files
            };
            let ended = discard(&aside, &goes_on).unwrap();
            assert_eq!(ended == Discarded::Gone, !aside.exists());
            if ended == Discarded::Gone {
                break;
            }
            assert_eq!(ended, Discarded::Interrupted);
            drop(new);
            let again = take(dir.path()).unwrap();
            assert_eq!(folder(&again).set_aside(), std::slice::from_ref(&aside));
            discard_all(&again);
            assert!(!aside.exists(), "after {num_files} files");
            drop(again);
            let last = take(dir.path()).unwrap();
            assert!(folder(&last).set_aside().is_empty());
            num_files += 1;
        }
        assert!(num_files > 6, "the run has more files than {num_files}");
    }

    #[test]
    fn a_cancelled_removal_leaves_the_folder_and_the_marker() {
        let dir = tempfile::tempdir().unwrap();
        let old = take(dir.path()).unwrap();
        fill(dir.path(), 7, &old.id);
        let new = anew(old, dir.path());
        let before = fs::read(dir.path().join(MARKER)).unwrap();
        folder(&new).discard_set_aside(&AtomicBool::new(true), &Progress::none());
        let aside = &folder(&new).set_aside()[0];
        assert!(aside.join("checkpoints/step-00000007/weights").is_file());
        assert_eq!(fs::read(dir.path().join(MARKER)).unwrap(), before);
    }

    /// Both runs set one aside, in folders of the same name.
    #[test]
    fn nothing_of_another_run_in_the_folders_place_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let start = || {
            let old = take(&path).unwrap();
            fill(&path, 7, &old.id);
            anew(old, &path)
        };
        let first = start();
        let aside = folder(&first).set_aside().remove(0);
        fs::rename(&path, dir.path().join("moved")).unwrap();
        let second = start();
        fs::rename(&folder(&second).set_aside()[0], &aside).unwrap();
        let before = fs::read(path.join(MARKER)).unwrap();
        discard_all(&first);
        assert!(aside.join("checkpoints/step-00000007/weights").is_file());
        assert_eq!(fs::read(path.join(MARKER)).unwrap(), before);
        assert!(second.check().is_ok());
    }
}

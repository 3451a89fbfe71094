//! Removes the runs that `--fresh` set aside, once the new run has a checkpoint.
//!
//! The marker names a run that was set aside until it is removed. A removal that was interrupted or
//! failed is continued after the next checkpoint, or by the next start.

use std::{
    ffi::OsString,
    fs, io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use megaburn_checkpoint::{checkpoint_step, checkpoints_of, is_there};
use megaburn_collective::Progress;
use megaburn_models::assets::ASSETS;

use super::{
    RunFolder,
    aside::{clear, fail, is_removed},
    marker::Marker,
    names::{CHECKPOINTS, LOCK, MARKER, names_in},
    owned::Owned,
};
use crate::error::TrainError;

/// The end of the removal of one folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discarded {
    /// The folder is gone.
    Gone,
    /// The folder holds other files, or a run was started in it. These files stay.
    HoldsOthers,
    /// The removal was asked to stop, or the folder of the run may no longer be this run's.
    Interrupted,
}

/// Asked before each file that is removed, with the file's length.
type GoesOn<'a> = &'a dyn Fn(u64) -> bool;

impl RunFolder {
    /// Removes the runs that `--fresh` set aside, file by file, until `is_cancelled` is set. The
    /// bytes of each file count as progress. Nothing is removed, and the marker is not written,
    /// where another run has taken the folder.
    pub(crate) fn discard_set_aside(&self, is_cancelled: &AtomicBool, progress: &Progress) {
        let goes_on = |bytes: u64| {
            // An empty file is progress too.
            progress.add(bytes.max(1));
            !is_cancelled.load(Ordering::Relaxed) && self.is_certainly_in_place()
        };
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
            match discard(&folder, &goes_on) {
                Ok(Discarded::Gone) => {}
                Ok(Discarded::HoldsOthers) => {
                    tracing::warn!("`{shown}` was not removed: it contains other files");
                }
                Ok(Discarded::Interrupted) => break,
                Err(error) => {
                    tracing::warn!(
                        "cannot remove `{shown}`: {error}; this is tried again after the next \
                        checkpoint"
                    );
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

    /// Whether the folder at the path can be examined now, and is the one that this run has taken.
    fn is_certainly_in_place(&self) -> bool {
        matches!(self.held().lock.is_in_place(), Ok(Ok(())))
    }

    /// Writes the marker again, if the folder still belongs to this run.
    fn write_marker(&self) {
        let path = self.path.join(MARKER);
        let shown = path.display();
        if let Err(why) = self.check_all() {
            tracing::warn!("`{shown}` was not written: {why}");
            return;
        }
        let marker = self.held().marker.clone();
        if let Err(error) = marker.write(&self.path) {
            tracing::warn!("cannot write `{shown}`: {error}");
        }
    }
}

/// Removes a folder with a run that was set aside: the files that the run wrote, and the folder
/// itself if nothing else is in it.
fn discard(folder: &Path, goes_on: GoesOn<'_>) -> Result<Discarded, TrainError> {
    let lock = folder.join(LOCK);
    // The lock of a run is not set aside with it, so this is the lock of a later start.
    let is_resumed = || is_there(&lock);
    let goes_on: GoesOn<'_> = &|bytes| goes_on(bytes) && !is_resumed();
    let interrupted = || match is_resumed() {
        true => Ok(Discarded::HoldsOthers),
        false => Ok(Discarded::Interrupted),
    };
    if is_resumed() {
        return Ok(Discarded::HoldsOthers);
    }
    if let Some(marker) = Marker::read(folder)? {
        let steps = folder.join(CHECKPOINTS);
        for (_, checkpoint) in checkpoints_of(&steps, &marker.run_id)? {
            if !remove(&checkpoint, goes_on)? {
                return interrupted();
            }
        }
        for name in names_in(folder).map_err(fail(folder))? {
            let path = folder.join(&name);
            let owned = Owned::of(&name).filter(|owned| owned.name != MARKER);
            let is_removed = match owned.filter(|owned| owned.is_ours(&path)) {
                Some(owned) if owned.is_folder() => remove(&path, goes_on)?,
                Some(_) => remove_file(&path, goes_on)?,
                None => true,
            };
            if !is_removed {
                return interrupted();
            }
        }
        remove_emptied(folder)?;
    }
    match clear(folder).map_err(fail(folder))? {
        true => Ok(Discarded::Gone),
        false => Ok(Discarded::HoldsOthers),
    }
}

/// Removes the folders of a run that an earlier removal has emptied.
fn remove_emptied(folder: &Path) -> Result<(), TrainError> {
    let steps = folder.join(CHECKPOINTS);
    let names = match names_in(&steps) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        names => names.map_err(fail(&steps))?,
    };
    let names = names.iter().filter(|name| checkpoint_step(name).is_some());
    let emptied = names.map(|name| steps.join(name));
    for path in emptied.chain([folder.join(ASSETS)]) {
        if path.is_dir() && !path.is_symlink() {
            is_removed(&path).map_err(fail(&path))?;
        }
    }
    Ok(())
}

/// Removes a folder and what is in it, as long as `goes_on` says so. A link is removed, and not
/// what it points to. Returns whether all is removed.
///
/// The last names are removed first: a checkpoint's manifest and the mark of other folders, which
/// say that a run wrote them, sort before the run's other files.
fn remove(path: &Path, goes_on: GoesOn<'_>) -> Result<bool, TrainError> {
    if path.is_symlink() || !path.is_dir() {
        return remove_file(path, goes_on);
    }
    let entries = fs::read_dir(path).map_err(fail(path))?;
    let name = |entry: io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name());
    let names: io::Result<Vec<OsString>> = entries.map(name).collect();
    let mut names = names.map_err(fail(path))?;
    names.sort_unstable();
    for name in names.iter().rev() {
        if !remove(&path.join(name), goes_on)? {
            return Ok(false);
        }
    }
    if !goes_on(0) {
        return Ok(false);
    }
    fs::remove_dir(path).map(|()| true).map_err(fail(path))
}

/// Removes a file or a link, if `goes_on` says so. Returns whether it is removed.
fn remove_file(path: &Path, goes_on: GoesOn<'_>) -> Result<bool, TrainError> {
    let bytes = fs::symlink_metadata(path).map_or(0, |metadata| metadata.len());
    if !goes_on(bytes) {
        return Ok(false);
    }
    fs::remove_file(path).map(|()| true).map_err(fail(path))
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        path::PathBuf,
        sync::{Arc, atomic::AtomicU64},
    };

    use super::*;
    use crate::run_folder::{
        RunShare, assets,
        tests::{anew, discard_all, fill, folder, take},
    };

    /// A run with two checkpoints, small files of its model and a configuration, which `--fresh` has
    /// set aside, and the folder with it.
    fn set_aside(dir: &Path) -> (RunShare, PathBuf) {
        let old = take(dir).unwrap();
        folder(&old).write_config("[run]\n").unwrap();
        for step in [7, 9] {
            fill(dir, step, &old.id);
            let checkpoint = dir.join(format!("checkpoints/step-{step:08}"));
            fs::write(checkpoint.join("manifest.xxh3"), "0").unwrap();
        }
        assets::tests::put(dir, &old.id);
        let new = anew(old, dir);
        let aside = folder(&new).set_aside().remove(0);
        (new, aside)
    }

    #[test]
    fn an_interrupted_removal_is_continued_whatever_is_gone() {
        let mut num_removed = 0;
        loop {
            let dir = tempfile::tempdir().unwrap();
            let (new, aside) = set_aside(dir.path());
            let asked = Cell::new(0);
            let goes_on = |_| {
                asked.set(asked.get() + 1);
                asked.get() <= num_removed
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
            assert!(!aside.exists(), "after {num_removed} files and folders");
            drop(again);
            let last = take(dir.path()).unwrap();
            assert!(folder(&last).set_aside().is_empty());
            num_removed += 1;
        }
        assert!(
            num_removed > 12,
            "the run has more than {num_removed} files"
        );
    }

    #[test]
    fn a_cancelled_removal_leaves_the_folder_and_the_marker() {
        let dir = tempfile::tempdir().unwrap();
        let (new, aside) = set_aside(dir.path());
        let before = fs::read(dir.path().join(MARKER)).unwrap();
        folder(&new).discard_set_aside(&AtomicBool::new(true), &Progress::none());
        assert!(aside.join("checkpoints/step-00000007/weights").is_file());
        assert_eq!(fs::read(dir.path().join(MARKER)).unwrap(), before);
    }

    #[test]
    fn a_removal_reports_its_progress() {
        let dir = tempfile::tempdir().unwrap();
        let (new, _) = set_aside(dir.path());
        let done = Arc::new(AtomicU64::new(0));
        let progress = Progress::counter(done.clone());
        folder(&new).discard_set_aside(&AtomicBool::new(false), &progress);
        assert!(done.load(Ordering::Relaxed) > 12);
    }

    /// The user has resumed the run that was set aside, in its new place.
    #[test]
    fn a_run_that_was_started_in_the_folder_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (new, aside) = set_aside(dir.path());
        let resumed = take(&aside).unwrap();
        discard_all(&new);
        resumed.check().unwrap();
        assert!(aside.join("checkpoints/step-00000009/weights").is_file());
        assert!(folder(&new).set_aside().is_empty(), "it is not this run's");
    }

    /// Both runs set one aside, in folders of the same name.
    #[test]
    fn nothing_of_another_run_in_the_folders_place_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let (first, aside) = set_aside(&path);
        fs::rename(&path, dir.path().join("moved")).unwrap();
        let (second, other) = set_aside(&path);
        fs::rename(&other, &aside).unwrap();
        let before = fs::read(path.join(MARKER)).unwrap();
        assert!(!folder(&first).is_certainly_in_place());
        discard_all(&first);
        folder(&first).write_marker();
        assert!(aside.join("checkpoints/step-00000007/weights").is_file());
        assert_eq!(fs::read(path.join(MARKER)).unwrap(), before);
        assert!(second.check().is_ok());
    }
}

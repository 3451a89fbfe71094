//! The folder of checkpoints: names, committed checkpoints, leftovers.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use megaburn_collective::Group;

use crate::{
    agree::settle,
    checkpoint::run_folder_of,
    error::{CheckpointError, IoContext},
    hosts::check::check_folders,
    manifest::rank_of_file,
    owner::{is_abandoned, is_blank, is_of_run, unmark},
    paths::{PART, REPLACED, is_there, leftover_of, parent, sibling_path, sync_dir},
    place::Place,
    unfinished::remove_marked,
};

/// In the name of a checkpoint that was found damaged.
pub(crate) const DAMAGED: &str = ".damaged-";

/// Creates the folder if it does not exist, and removes what a crash left behind: folders with a
/// temporary name and mark of a save. Checks that each host has a folder of its own, if the place
/// says so. Call it when a run starts, before loading or saving.
///
/// # Errors
/// The folder cannot be created or read, on any rank; a folder is of two hosts.
/// # Collective
/// All ranks of `world`; rank 0 does the work, or the first rank of each host.
pub fn prepare(place: impl Into<Place>, world: &Group) -> Result<(), CheckpointError> {
    let place = place.into();
    let dir = place.dir();
    let create = || fs::create_dir_all(dir).during("create the folder", dir);
    let is_keeper = place.is_keeper(world);
    settle(world, if is_keeper { create() } else { Ok(()) })?;
    check_folders(&place, world)?;
    settle(world, if is_keeper { clean(dir) } else { Ok(()) })
}

/// Moves every committed checkpoint from the folder `from` to the folder `to`, which must exist.
/// Anything else in `from` stays, and so does a checkpoint that `to` already has.
///
/// # Errors
/// A checkpoint cannot be moved.
pub fn move_checkpoints(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    for (step, path) in committed(from)? {
        let target = checkpoint_path(to, step);
        if !is_there(&target) {
            fs::rename(&path, &target).during("move aside", &path)?;
        }
    }
    if from.is_dir() {
        sync_dir(from)?;
    }
    sync_dir(to)
}

/// Renames a checkpoint that was found damaged to `step-XXXXXXXX.damaged-…`. Under that name it is
/// neither loaded nor counted nor deleted. Returns its new path.
///
/// # Errors
/// It cannot be renamed.
pub fn set_aside_damaged(path: &Path) -> Result<PathBuf, CheckpointError> {
    let aside = sibling_path(path, DAMAGED);
    fs::rename(path, &aside).during("move aside", path)?;
    sync_dir(parent(path))?;
    Ok(aside)
}

fn clean(dir: &Path) -> Result<(), CheckpointError> {
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sync_dir(parent)?;
    }
    for (name, path) in entries(dir)? {
        if checkpoint_step(&name).is_some() {
            // The run was killed just before or after the checkpoint got this name.
            if is_of_run(&path) {
                unmark(&path).during("remove the owner mark of an ended run in", &path)?;
            }
            remove_parts(&path)?;
            continue;
        }
        let leftover = leftover_of(&name).filter(|(of, _)| checkpoint_step(of).is_some());
        let Some((of, suffix)) = leftover.filter(|_| is_left(&path)) else {
            continue;
        };
        let target = dir.join(of);
        // After a crash between the two renames of a replacement, only the old checkpoint exists.
        if suffix == REPLACED && !is_there(&target) {
            fs::rename(&path, &target).during("restore", &path)?;
            unmark(&target).during("remove the owner mark of an ended run in", &target)?;
        } else {
            remove_marked(&path);
        }
    }
    sync_dir(dir)
}

/// Removes files of a checkpoint that were still being copied from another host.
fn remove_parts(checkpoint: &Path) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(checkpoint).during("read the folder", checkpoint)? {
        let path = entry.during("read the folder", checkpoint)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy());
        let whole = name.as_deref().and_then(|name| name.strip_suffix(PART));
        if whole.and_then(rank_of_file).is_some() {
            fs::remove_file(&path).during("remove", &path)?;
        }
    }
    Ok(())
}

/// Whether a folder with a leftover's name is a leftover. No other run works in the parent folder,
/// but a conversion may.
fn is_left(path: &Path) -> bool {
    !path.is_symlink() && (is_of_run(path) || is_abandoned(path) || is_blank(path))
}

/// Committed checkpoints, newest first. They are not verified.
pub(crate) fn committed(dir: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    // A folder that cannot be accessed may hold checkpoints, so that is an error.
    if !dir.try_exists().during("read the folder", dir)? {
        return Ok(Vec::new());
    }
    let steps = entries(dir)?.into_iter();
    let mut found: Vec<_> = steps
        .filter_map(|(name, path)| Some((checkpoint_step(&name)?, path)))
        .collect();
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

/// The checkpoints in a folder that the run `run_id` wrote according to their manifests, newest
/// first. Nothing is verified.
///
/// # Errors
/// The folder cannot be read. A folder that does not exist holds no checkpoints.
pub fn checkpoints_of(dir: &Path, run_id: &str) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let mut found = committed(dir)?;
    found.retain(|(_, path)| run_folder_of(path).as_deref() == Some(run_id));
    Ok(found)
}

/// The folders in a folder: names and paths.
pub(crate) fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, CheckpointError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).during("read the folder", dir)? {
        let entry = entry.during("read the folder", dir)?;
        let is_dir = match fs::metadata(entry.path()) {
            Ok(metadata) => metadata.is_dir(),
            // A broken link, or an entry that another process just removed.
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error).during("read", &entry.path()),
        };
        if is_dir {
            found.push((
                entry.file_name().to_string_lossy().into_owned(),
                entry.path(),
            ));
        }
    }
    Ok(found)
}

/// The path of the checkpoint of a step in the folder of checkpoints `dir`.
pub fn checkpoint_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(step_name(step))
}

pub(crate) fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a committed checkpoint, if `name` is the name of one.
pub fn checkpoint_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        owner::Mark,
        testing::{make, names},
    };

    #[test]
    fn leftovers_are_removed_and_what_only_has_such_a_name_stays() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        let left = [
            "step-00000002.tmp-1-2",
            "step-00000001.trash-7-8",
            "step-00000001.replaced-1-2",
        ];
        let replaced = ["step-00000001", "step-00000009.replaced-1-2"];
        for name in left.into_iter().chain(replaced) {
            Mark::of_run(&make(here, name)).unwrap();
        }
        drop(Mark::of_process(&make(here, "step-00000004.tmp-1-3")).unwrap());
        fs::create_dir(here.join("step-00000002.tmp-1-4")).unwrap();
        // Unmarked folders, other names, and a conversion in progress.
        let stay = [
            "notes",
            "other.tmp-1-2",
            "step-00000001.replaced-good",
            "step-00000003.tmp-1-2",
            "step-00000005.replaced-1-2",
            "step-00000500.tmp-copy",
        ];
        let stay = stay.map(|name| make(here, name));
        let converts = make(here, "step-00000000.tmp-1-2");
        let _mark = Mark::of_process(&converts).unwrap();
        Mark::of_run(&stay[5]).unwrap();
        prepare(here, &Group::single(0)).unwrap();
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_string();
        let mut expected: Vec<_> = stay.iter().chain([&converts]).map(name).collect();
        expected.extend(["step-00000001", "step-00000009"].map(String::from));
        expected.sort();
        assert_eq!(names(here), expected);
        let restored = fs::read_to_string(here.join("step-00000009/weights")).unwrap();
        assert_eq!(restored, "step-00000009.replaced-1-2");
        assert_eq!(names(&here.join("step-00000001")), ["weights"]);
        assert_eq!(names(&here.join("step-00000009")), ["weights"]);
    }
}

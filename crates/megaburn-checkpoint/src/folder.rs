//! The folder of checkpoints: names, committed checkpoints, leftovers.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use crate::{
    checkpoint::run_folder_of,
    error::{CheckpointError, IoContext},
    owner::{is_abandoned, is_blank, is_of_run},
    paths::{is_there, parent, sibling_path, sync_dir},
};

/// In the name of a checkpoint that was found damaged.
pub(crate) const DAMAGED: &str = ".damaged-";
/// In the name of a checkpoint that may hold wrong values.
pub(crate) const SUSPECT: &str = ".suspect-";

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
    set_aside(path, DAMAGED)
}

/// Renames a checkpoint that may hold wrong values, because the memory of a rank failed before it
/// was complete, to `step-XXXXXXXX.suspect-…`. Under that name it is neither loaded nor counted nor
/// deleted. Returns its new path.
///
/// # Errors
/// It cannot be renamed.
pub fn set_aside_suspect(path: &Path) -> Result<PathBuf, CheckpointError> {
    set_aside(path, SUSPECT)
}

fn set_aside(path: &Path, suffix: &str) -> Result<PathBuf, CheckpointError> {
    let aside = sibling_path(path, suffix);
    fs::rename(path, &aside).during("move aside", path)?;
    sync_dir(parent(path))?;
    Ok(aside)
}

/// Whether a folder with a leftover's name is a leftover. No other run works in the parent folder,
/// but a conversion may.
pub(crate) fn is_left(path: &Path) -> bool {
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

//! The folder of checkpoints: names, what is committed, leftovers, retention.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use megaburn_collective::Group;

use crate::{
    Checkpoint, CheckpointError,
    agree::settle,
    error::IoContext,
    staging::{REPLACED, TMP, beside, discard, parent, sync_dir, unique},
};

/// Suffix of a checkpoint that was found damaged.
const DAMAGED: &str = ".damaged-";
/// Suffix of a checkpoint on its way out.
const TRASH: &str = ".trash-";

/// Makes the folder if there is none and removes what a crash left behind. Call it when a run
/// starts, before loading or saving.
///
/// # Errors
/// The folder cannot be made or read, on any rank.
/// # Collective
/// All ranks of `world`; rank 0 works.
pub fn prepare(dir: &Path, world: &Group) -> Result<(), CheckpointError> {
    let mine = if world.rank() == 0 { clean(dir) } else { Ok(()) };
    settle(world, mine)
}

/// Moves every committed checkpoint of the folder `from` into the folder `to`, which must be there; what
/// else `from` holds stays. A checkpoint that `to` has already is not moved.
///
/// # Errors
/// One cannot be moved.
pub fn move_checkpoints(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    for (step, path) in committed(from)? {
        let target = step_path(to, step);
        if !target.exists() {
            fs::rename(&path, &target).during("move aside", &path)?;
        }
    }
    if from.is_dir() {
        sync_dir(from)?;
    }
    sync_dir(to)
}

/// Gives a checkpoint that was found damaged the name `step-XXXXXXXX.damaged-…`, under which it is neither
/// loaded nor counted nor deleted. Returns its new path.
///
/// # Errors
/// It cannot be renamed.
pub fn set_aside_damaged(path: &Path) -> Result<PathBuf, CheckpointError> {
    let aside = beside(path, DAMAGED);
    fs::rename(path, &aside).during("move aside", path)?;
    sync_dir(parent(path))?;
    Ok(aside)
}

fn clean(dir: &Path) -> Result<(), CheckpointError> {
    fs::create_dir_all(dir).during("make the folder", dir)?;
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sync_dir(parent)?;
    }
    for (name, path) in entries(dir)? {
        let Some((step, _)) = name.split_once('.').filter(|(step, _)| parse_step(step).is_some())
        else {
            continue;
        };
        // A crash between the two renames of a replacement leaves only the old checkpoint.
        if name.contains(REPLACED) && !dir.join(step).exists() {
            fs::rename(&path, dir.join(step)).during("restore", &path)?;
        } else if [TMP, TRASH, REPLACED].iter().any(|suffix| name.contains(suffix)) {
            fs::remove_dir_all(&path).during("remove the leftover", &path)?;
        }
    }
    sync_dir(dir)
}

/// Committed checkpoints, newest first. Whether they are whole is not looked at.
pub(crate) fn committed(dir: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    // A folder that cannot be looked at may hold some: that is an error.
    if !dir.try_exists().during("read the folder", dir)? {
        return Ok(Vec::new());
    }
    let steps = entries(dir)?.into_iter();
    let mut found: Vec<_> =
        steps.filter_map(|(name, path)| Some((parse_step(&name)?, path))).collect();
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

/// Keeps the newest `keep` checkpoints up to `current` (0 keeps all). Later ones are of another
/// past of the run and are not touched. One whose manifest or length says that it is damaged is not counted
/// and not deleted: it may be all that is left of a step.
pub(crate) fn retain(dir: &Path, current: u64, keep: usize) -> Result<(), CheckpointError> {
    let past = committed(dir)?.into_iter().filter(|(step, _)| *step <= current);
    let whole = past.filter(|(_, path)| Checkpoint::open(path).is_ok());
    for (step, path) in whole.skip(if keep == 0 { usize::MAX } else { keep }) {
        // Deleting takes time: what is half deleted must not look like a checkpoint.
        let trash = dir.join(format!("{}{TRASH}{}", step_name(step), unique()));
        fs::rename(&path, &trash).during("move aside", &path)?;
        discard(&trash);
    }
    Ok(())
}

fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, CheckpointError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).during("read the folder", dir)? {
        let entry = entry.during("read the folder", dir)?;
        let is_dir = match fs::metadata(entry.path()) {
            Ok(metadata) => metadata.is_dir(),
            // A link to nowhere, or what another process just removed.
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error).during("read", &entry.path()),
        };
        if is_dir {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    Ok(found)
}

/// Where the checkpoint of a step stands.
pub(crate) fn step_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(step_name(step))
}

fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

fn parse_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(dir: &Path, names: &[&str]) {
        for name in names {
            fs::create_dir_all(dir.join(name)).unwrap();
            fs::write(dir.join(name).join("x"), name).unwrap();
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = entries(dir).unwrap().into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
    }

    #[test]
    fn leftovers_are_removed_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        make(here, &["step-00000001", "step-00000002.tmp-1-2", "step-00000001.trash-7", "notes"]);
        make(here, &["step-00000001.replaced-1", "step-00000009.replaced-1", "other.tmp-1"]);
        prepare(here, &Group::single(0)).unwrap();
        assert_eq!(names(here), ["notes", "other.tmp-1", "step-00000001", "step-00000009"]);
        let restored = fs::read_to_string(here.join("step-00000009/x")).unwrap();
        assert_eq!(restored, "step-00000009.replaced-1");
    }
}

//! Sets the existing run aside for `--fresh`. It stays intact until the new run has a checkpoint.
//!
//! First the run is moved into `before-TIME.tmp-…`. Then the new run's marker, which names
//! `before-TIME`, is written; from then on the folder belongs to the new run. After a crash, the
//! next start undoes a move that no marker names, and completes one that a marker names.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{
    TMP, checkpoint_step, is_there, leftover_of, move_checkpoints, sibling_path, sync_folder,
};

use super::{
    marker::Marker,
    names::{CHECKPOINTS, MARKER, METRICS, names_in},
    owned::{Fresh, Owned, half_written},
};
use crate::{error::TrainError, time::name_of_now};

/// Prefix of the folders that hold runs which `--fresh` set aside.
const ASIDE: &str = "before-";

pub(super) fn fail(path: &Path) -> impl Fn(io::Error) -> TrainError {
    move |source| TrainError::Write {
        path: path.into(),
        source,
    }
}

/// Moves the checkpoints of the run in `dir`, and the files that `--fresh` moves, into a temporary
/// folder that will become the run folder `dir/before-TIME`. Returns that name, or `None` if there
/// are no checkpoints, because then nothing would be lost. The next marker must name it; [`settle`]
/// then renames the folder.
///
/// # Errors
/// Something cannot be moved; [`settle`] undoes the rest.
pub(super) fn set_aside(dir: &Path, marker: &Marker) -> Result<Option<String>, TrainError> {
    let checkpoints = dir.join(CHECKPOINTS);
    let is_step = |name: &String| checkpoint_step(name).is_some();
    if !names_in(&checkpoints).is_ok_and(|names| names.iter().any(is_step)) {
        return Ok(None);
    }
    let name = format!("{ASIDE}{}", name_of_now());
    let moving = sibling_path(&dir.join(&name), TMP);
    fs::create_dir(&moving).map_err(fail(&moving))?;
    // The marker is the first file, so that the next start knows which run the folder belongs to.
    marker
        .clone()
        .with_set_aside(Vec::new())
        .write(&moving)
        .map_err(fail(&moving))?;
    let steps = moving.join(CHECKPOINTS);
    fs::create_dir(&steps).map_err(fail(&steps))?;
    move_steps(&checkpoints, &steps, &name)?;
    for name in names_in(dir).map_err(fail(dir))? {
        let from = dir.join(&name);
        let to = moving.join(&name);
        match Owned::of(&name)
            .filter(|owned| owned.is_ours(&from))
            .map(|owned| owned.fresh)
        {
            Some(Fresh::Moves) => fs::rename(&from, to).map_err(fail(&from))?,
            Some(Fresh::IsCopied) => fs::copy(&from, to).map(drop).map_err(fail(&from))?,
            Some(Fresh::Stays) | None => {}
        }
    }
    sync_folder(&moving).map_err(fail(&moving))?;
    Ok(Some(name))
}

/// Moves checkpoints into `to`. If `from` is a link to another file system, they stay there in a
/// new folder, and `to` becomes a link to it.
fn move_steps(from: &Path, to: &Path, name: &str) -> Result<(), TrainError> {
    if !from.is_symlink() {
        return Ok(move_checkpoints(from, to)?);
    }
    let there = fs::canonicalize(from).map_err(fail(from))?.join(name);
    fs::create_dir(&there).map_err(fail(&there))?;
    fs::remove_dir(to)
        .and_then(|()| symlink(&there, to))
        .map_err(fail(to))?;
    Ok(move_checkpoints(from, &there)?)
}

/// Completes every [`set_aside`] that the folder's marker names, and undoes the others of this run.
pub(super) fn settle(dir: &Path, marker: &Marker) -> Result<(), TrainError> {
    for found in names_in(dir).map_err(fail(dir))? {
        let Some(name) = half_set_aside(&found) else {
            continue;
        };
        let moving = dir.join(&found);
        let owner = Marker::read(&moving).ok().flatten();
        if owner.is_none() {
            remove_blank(&moving);
        } else if marker.set_aside.iter().any(|aside| aside == name) {
            fs::rename(&moving, dir.join(name)).map_err(fail(&moving))?;
        } else if owner.is_some_and(|owner| owner.run_id == marker.run_id) {
            undo(dir, &moving)?;
        }
    }
    sync_folder(dir).map_err(fail(dir))
}

/// Removes the folder of a start that was killed before it wrote the marker, if nothing else is in
/// it.
fn remove_blank(moving: &Path) {
    let names = names_in(moving).unwrap_or_default();
    if !moving.is_symlink() && names.iter().all(|name| half_written(name) == Some(MARKER)) {
        for name in names {
            let _ = fs::remove_file(moving.join(name));
        }
        let _ = fs::remove_dir(moving);
    }
}

/// Moves everything back.
fn undo(dir: &Path, moving: &Path) -> Result<(), TrainError> {
    let steps = moving.join(CHECKPOINTS);
    if steps.is_dir() {
        move_checkpoints(&steps, &dir.join(CHECKPOINTS))?;
    }
    for name in names_in(moving).map_err(fail(moving))? {
        let from = moving.join(&name);
        let to = dir.join(&name);
        let moves = Owned::of(&name).is_some_and(|owned| owned.fresh == Fresh::Moves);
        if moves && !is_there(&to) {
            fs::rename(&from, to).map_err(fail(&from))?;
        }
    }
    ignore_absent(fs::remove_file(moving.join(METRICS))).map_err(fail(moving))?;
    clear(moving).map(drop).map_err(fail(moving))
}

/// Removes the folders and the marker of a run that was set aside, unless they contain something
/// else. Returns whether they are gone.
pub(super) fn clear(folder: &Path) -> io::Result<bool> {
    let steps = folder.join(CHECKPOINTS);
    let behind_link: Option<PathBuf> = fs::read_link(&steps).ok();
    if !is_removed(behind_link.as_deref().unwrap_or(&steps))? {
        return Ok(false);
    }
    if behind_link.is_some() {
        fs::remove_file(&steps)?;
    }
    ignore_absent(fs::remove_file(folder.join(MARKER)))?;
    is_removed(folder)
}

/// Removes a folder if it is empty. Returns whether it is gone.
pub(super) fn is_removed(folder: &Path) -> io::Result<bool> {
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
        result => ignore_absent(result).map(|()| true),
    }
}

fn ignore_absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether the name is the one of a folder into which `--fresh` was moving a run,
/// `before-TIME.tmp-PID-TIME`. Returns `before-TIME`.
fn half_set_aside(name: &str) -> Option<&str> {
    let is_aside = |(of, suffix): &(&str, &str)| *suffix == TMP && of.starts_with(ASIDE);
    leftover_of(name).filter(is_aside).map(|(of, _)| of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_was_being_set_aside_is_known_by_its_name() {
        assert_eq!(half_set_aside("before-2026.tmp-1f-2a"), Some("before-2026"));
        assert_eq!(half_set_aside("before-2026.tmp-thesis"), None);
    }
}

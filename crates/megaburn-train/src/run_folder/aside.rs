//! What `--fresh` does with the run that was there: it is set aside, whole, until the new run has a
//! checkpoint.

use std::{fs, io, os::unix::fs::symlink, path::Path};

use megaburn_checkpoint::move_checkpoints;
use megaburn_models::assets::ASSETS;

use super::{
    assets,
    config_file::is_ours,
    inspect::{is_there, names_in},
    marker::Marker,
    names::{
        ASIDE, CHECKPOINTS, CONFIG, MARKER, METRICS, MOVING, PICTURE, RESOLVED_CONFIG,
        is_checkpoint,
    },
};
use crate::{TrainError, time::name_of_now};

/// Whether a name is that of a folder in which an earlier run was set aside.
pub(super) fn is_aside(name: &str) -> bool {
    name.starts_with(ASIDE)
}

/// Moves the checkpoints of the run in `dir`, its model's small files, configuration and picture, and a
/// copy of its metrics into `dir/before-TIME`, which then is a run's folder. Returns its name; none if there
/// are no checkpoints, since there is nothing to lose then.
///
/// # Errors
/// Something cannot be moved; [`restore`] undoes what was done.
pub(super) fn set_aside(dir: &Path, marker: &Marker) -> Result<Option<String>, TrainError> {
    let checkpoints = dir.join(CHECKPOINTS);
    let has_steps =
        names_in(&checkpoints).is_ok_and(|names| names.iter().any(|name| is_checkpoint(name)));
    if !has_steps {
        return Ok(None);
    }
    let name = format!("{ASIDE}{}", name_of_now());
    let moving = dir.join(format!("{name}{MOVING}"));
    let io = |result: io::Result<()>, path: &Path| {
        result.map_err(|source| TrainError::Write { path: path.into(), source })
    };
    io(fs::create_dir(&moving), &moving)?;
    let steps = moving.join(CHECKPOINTS);
    io(fs::create_dir(&steps), &steps)?;
    move_steps(&checkpoints, &steps, &name)?;
    for small in movable(dir) {
        io(fs::rename(dir.join(&small), moving.join(&small)), &dir.join(&small))?;
    }
    let metrics = dir.join(METRICS);
    if metrics.is_file() {
        io(fs::copy(&metrics, moving.join(METRICS)).map(drop), &metrics)?;
    }
    io(marker.clone().with_set_aside(Vec::new()).write(&moving), &moving)?;
    io(fs::rename(&moving, dir.join(&name)), &moving)?;
    io(sync(dir), dir)?;
    Ok(Some(name))
}

/// Moves checkpoints into `to`. Where `from` is on another file system, behind a link, they stay there in a
/// folder of their own, and `to` becomes a link to it.
fn move_steps(from: &Path, to: &Path, name: &str) -> Result<(), TrainError> {
    if !from.is_symlink() {
        return Ok(move_checkpoints(from, to)?);
    }
    let fail = |source| TrainError::Write { path: from.into(), source };
    let there = fs::canonicalize(from).map_err(fail)?.join(name);
    fs::create_dir(&there).map_err(fail)?;
    fs::remove_dir(to).and_then(|()| symlink(&there, to)).map_err(fail)?;
    Ok(move_checkpoints(from, &there)?)
}

/// The files and folders that are the run's alone.
fn movable(dir: &Path) -> Vec<String> {
    let is_movable = |name: &&str| match *name {
        ASSETS => assets::is_ours(&dir.join(ASSETS)),
        CONFIG => is_ours(&dir.join(CONFIG)),
        name => dir.join(name).is_file(),
    };
    let names = [ASSETS, CONFIG, RESOLVED_CONFIG, PICTURE];
    names.into_iter().filter(is_movable).map(String::from).collect()
}

/// Undoes what a `--fresh` began that did not come to its end: everything goes back to where it was.
pub(super) fn restore(dir: &Path) -> Result<(), TrainError> {
    let fail = |path: &Path, source| TrainError::Write { path: path.into(), source };
    let names = names_in(dir).map_err(|source| fail(dir, source))?;
    for name in names.iter().filter(|name| is_aside(name) && name.ends_with(MOVING)) {
        let moving = dir.join(name);
        let steps = moving.join(CHECKPOINTS);
        if steps.is_dir() {
            move_checkpoints(&steps, &dir.join(CHECKPOINTS))?;
        }
        for small in [ASSETS, CONFIG, RESOLVED_CONFIG, PICTURE] {
            let (from, to) = (moving.join(small), dir.join(small));
            if is_there(&from).map_err(|source| fail(&from, source))? && !to.exists() {
                fs::rename(&from, &to).map_err(|source| fail(&from, source))?;
            }
        }
        discard(&moving).map_err(|source| fail(&moving, source))?;
    }
    Ok(())
}

/// Removes a folder in which a run was set aside: what that run owned, and the folder itself if nothing else
/// is in it. Returns whether it is gone.
pub(super) fn discard(folder: &Path) -> io::Result<bool> {
    let steps = folder.join(CHECKPOINTS);
    let behind_link = fs::read_link(&steps).ok();
    let steps_there = behind_link.as_deref().unwrap_or(&steps);
    for name in names_in(steps_there).unwrap_or_default() {
        if is_checkpoint(&name) {
            fs::remove_dir_all(steps_there.join(name))?;
        }
    }
    if behind_link.is_some() {
        fs::remove_file(&steps)?;
    }
    let hf = folder.join(ASSETS);
    if assets::is_ours(&hf) {
        fs::remove_dir_all(&hf)?;
    }
    for name in [METRICS, CONFIG, RESOLVED_CONFIG, PICTURE, MARKER] {
        ignore_absent(fs::remove_file(folder.join(name)))?;
    }
    for emptied in [steps_there, folder] {
        match fs::remove_dir(emptied) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(false),
            result => ignore_absent(result)?,
        }
    }
    Ok(true)
}

fn ignore_absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes the names in a folder survive a power loss.
pub(super) fn sync(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}

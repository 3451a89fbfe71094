//! Which checkpoints of a run stay after a new one was committed.

use std::{fs, path::Path};

use megaburn_collective::{Group, Progress, objects};

use crate::{
    agree::settle,
    checkpoint::Checkpoint,
    error::{CheckpointError, IoContext},
    folder::{committed, step_name, step_path},
    latest::verify_together,
    owner::Mark,
    paths::{TRASH, sibling_path},
    unfinished::remove_marked,
    verified::verified,
};

/// A checkpoint's name and, if a rank has verified it, whether it is intact.
type Known = (String, Option<bool>);

/// Deletes old checkpoints of the run `run_id`, once its newest `keep` up to `current` are intact;
/// `current` was just written, and 0 keeps all. Before an older checkpoint is deleted, all ranks
/// verify the remaining ones, each once per process.
///
/// These checkpoints are neither counted nor deleted:
///
/// - checkpoints after `current`, which belong to another past of the run
/// - checkpoints that another run or a conversion wrote
/// - damaged checkpoints, because one may be all that is left of a step
///
/// # Errors
/// The folder or a checkpoint cannot be read or deleted.
/// # Collective
/// All ranks of `world`. The files are distributed over the ranks for verification, and each
/// reports to `progress`.
pub(crate) fn retain(
    world: &Group,
    dir: &Path,
    run_id: Option<&str>,
    current: u64,
    keep: usize,
    progress: &Progress,
) -> Result<(), CheckpointError> {
    if keep == 0 {
        return Ok(());
    }
    let is_first = world.rank() == 0;
    let own = if is_first {
        known(dir, run_id, current)
    } else {
        Ok(Vec::new())
    };
    let own: Vec<Known> = objects::broadcast(world, &settle(world, own)?)?;
    if own.len() <= keep {
        return Ok(());
    }
    let mut own = own.into_iter();
    let mut kept = 0;
    while kept < keep
        && let Some((name, is_whole)) = own.next()
    {
        let is_whole = match is_whole {
            Some(is_whole) => is_whole,
            None => is_verified_valid(world, &dir.join(name), progress)?,
        };
        kept += usize::from(is_whole);
    }
    let old = own.filter(|(_, is_whole)| is_first && *is_whole != Some(false));
    old.into_iter()
        .try_for_each(|(name, _)| delete(&dir.join(name)))
}

/// The checkpoints that count for [`retain`], newest first. The one just written is known to be
/// intact.
fn known(dir: &Path, run_id: Option<&str>, current: u64) -> Result<Vec<Known>, CheckpointError> {
    let mut verified = verified();
    verified.remove(&step_path(dir, current));
    let past = committed(dir)?
        .into_iter()
        .filter(|(step, _)| *step <= current);
    let is_own = |path: &Path| {
        Checkpoint::open(path).is_ok_and(|found| found.manifest().run_id.as_deref() == run_id)
    };
    let known = past.filter(|(_, path)| is_own(path)).map(|(step, path)| {
        let is_whole = if step == current {
            Some(true)
        } else {
            verified.get(&path).copied()
        };
        (step_name(step), is_whole)
    });
    Ok(known.collect())
}

fn is_verified_valid(
    world: &Group,
    path: &Path,
    progress: &Progress,
) -> Result<bool, CheckpointError> {
    let found = verify_together(world, path, progress)?;
    if let Err(why) = &found
        && world.rank() == 0
    {
        let path = path.display();
        tracing::warn!("checkpoint {path} does not count towards the checkpoints to keep: {why}");
    }
    Ok(found.is_ok())
}

/// Deletes a checkpoint. It is renamed first, so that a kill in the middle leaves no partial
/// checkpoint under a checkpoint's name.
fn delete(path: &Path) -> Result<(), CheckpointError> {
    if path.is_symlink() {
        return fs::remove_file(path).during("remove the link", path);
    }
    Mark::of_run(path).during("write into", path)?;
    let trash = sibling_path(path, TRASH);
    fs::rename(path, &trash).during("move aside", path)?;
    remove_marked(&trash);
    Ok(())
}

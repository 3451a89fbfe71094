//! Which checkpoints of a run stay after a new one was committed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use megaburn_collective::{Group, Progress, objects};

use crate::{
    agree::settle,
    checkpoint::Checkpoint,
    error::{CheckpointError, IoContext},
    folder::{checkpoint_path, committed},
    latest::verify_together,
    owner::Mark,
    paths::{TRASH, sibling_path},
    unfinished::remove_marked,
    verified::verified,
};

/// Which checkpoints of a run stay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Retention {
    /// The number of newest intact checkpoints that stay; 0 keeps all checkpoints.
    pub newest: usize,
    /// Checkpoints whose step is a multiple of this number stay too; 0 keeps none for that reason.
    ///
    /// Source: Megatron-LM `--save-retain-interval`.
    pub every: u64,
    /// The number of checkpoints that stay because their loss is lowest.
    pub best: usize,
    /// The loss at the steps at which it was measured, on rank 0. Others are not among the best.
    pub losses: BTreeMap<u64, f64>,
}

impl Retention {
    /// Keeps the newest `newest` checkpoints; 0 keeps all.
    pub fn newest(newest: usize) -> Self {
        Self {
            newest,
            ..Self::default()
        }
    }

    /// Returns the steps whose checkpoints stay for another reason than being new.
    pub fn kept(&self, steps: impl Iterator<Item = u64>) -> BTreeSet<u64> {
        let steps: Vec<u64> = steps.collect();
        let is_kept = |step: &u64| self.every > 0 && step.is_multiple_of(self.every);
        let mut kept: BTreeSet<u64> = steps.iter().copied().filter(is_kept).collect();
        kept.extend(self.best_of(steps.into_iter()));
        kept
    }

    /// Returns the `best` steps with the lowest loss.
    fn best_of(&self, steps: impl Iterator<Item = u64>) -> BTreeSet<u64> {
        let loss = |step: &u64| self.losses.get(step).copied();
        let measured = steps.filter_map(|step| Some((loss(&step)?, step)));
        let mut measured: Vec<_> = measured.filter(|(loss, _)| !loss.is_nan()).collect();
        measured.sort_by(|(a, step_a), (b, step_b)| a.total_cmp(b).then(step_a.cmp(step_b)));
        let best = measured.into_iter().take(self.best);
        best.map(|(_, step)| step).collect()
    }
}

/// A checkpoint's step and, if a rank has verified it, whether it is intact.
type Known = (u64, Option<bool>);

/// Deletes the checkpoints of the run `run_id` that `retention` does not keep, once the newest and
/// the best ones up to `current` are intact; `current` was just written. Before an older checkpoint
/// is deleted, all ranks verify those, each once per process.
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
    retention: &Retention,
    progress: &Progress,
) -> Result<(), CheckpointError> {
    if retention.newest == 0 {
        return Ok(());
    }
    loop {
        let own = if world.rank() == 0 {
            known(dir, run_id, current, progress)
        } else {
            Ok(Vec::new())
        };
        let own = settle(world, own)?;
        let next: Vec<u64> = objects::broadcast(world, &unverified(&own, retention))?;
        if next.is_empty() {
            return delete_others(dir, own, retention);
        }
        for step in next {
            verify(world, &checkpoint_path(dir, step), progress)?;
        }
    }
}

/// The steps of the checkpoints that [`retain`] would verify.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn to_verify(
    dir: &Path,
    run_id: Option<&str>,
    current: u64,
    retention: &Retention,
) -> Result<Vec<u64>, CheckpointError> {
    if retention.newest == 0 {
        return Ok(Vec::new());
    }
    let own = known(dir, run_id, current, &Progress::none())?;
    Ok(unverified(&own, retention))
}

/// Deletes what [`retain`] deletes, unless a checkpoint that counts is still unverified.
///
/// # Errors
/// The folder cannot be read, or a checkpoint cannot be deleted.
pub(crate) fn delete_old(
    dir: &Path,
    run_id: Option<&str>,
    current: u64,
    retention: &Retention,
) -> Result<(), CheckpointError> {
    if retention.newest == 0 {
        return Ok(());
    }
    let own = known(dir, run_id, current, &Progress::none())?;
    if unverified(&own, retention).is_empty() {
        delete_others(dir, own, retention)
    } else {
        Ok(())
    }
}

/// Returns the steps of the newest and best checkpoints that are not verified yet. The list is empty
/// if no checkpoint will be deleted.
fn unverified(own: &[Known], retention: &Retention) -> Vec<u64> {
    let not_damaged = own.iter().filter(|(_, is_whole)| *is_whole != Some(false));
    let not_damaged: Vec<_> = not_damaged.copied().collect();
    if not_damaged.len() <= retention.newest {
        return Vec::new();
    }
    let best = retention.best_of(not_damaged.iter().map(|(step, _)| *step));
    let counts =
        |(place, (step, _)): &(usize, Known)| *place < retention.newest || best.contains(step);
    let counted = not_damaged.into_iter().enumerate().filter(counts);
    counted
        .filter(|(_, (_, is_whole))| is_whole.is_none())
        .map(|(_, (step, _))| step)
        .collect()
}

fn delete_others(
    dir: &Path,
    own: Vec<Known>,
    retention: &Retention,
) -> Result<(), CheckpointError> {
    let own = own.into_iter();
    let own: Vec<_> = own
        .filter(|(_, is_whole)| *is_whole != Some(false))
        .collect();
    let others = retention.kept(own.iter().map(|(step, _)| *step));
    own.into_iter()
        .skip(retention.newest)
        .filter(|(step, _)| !others.contains(step))
        .try_for_each(|(step, _)| delete(&checkpoint_path(dir, step)))
}

/// The checkpoints that count for [`retain`], newest first. The one just written is known to be
/// intact.
fn known(
    dir: &Path,
    run_id: Option<&str>,
    current: u64,
    progress: &Progress,
) -> Result<Vec<Known>, CheckpointError> {
    let mut verified = verified();
    verified.remove(&checkpoint_path(dir, current));
    let past = committed(dir)?
        .into_iter()
        .filter(|(step, _)| *step <= current);
    let is_own = |path: &Path| {
        progress.add(0);
        Checkpoint::open(path).is_ok_and(|found| found.manifest().run_id.as_deref() == run_id)
    };
    let known = past.filter(|(_, path)| is_own(path)).map(|(step, path)| {
        let is_whole = if step == current {
            Some(true)
        } else {
            verified.get(&path).copied()
        };
        (step, is_whole)
    });
    Ok(known.collect())
}

fn verify(world: &Group, path: &Path, progress: &Progress) -> Result<(), CheckpointError> {
    let found = verify_together(world, path, progress)?;
    warn_of_damage(world, path, &found);
    Ok(())
}

/// Logs on rank 0 that a damaged checkpoint does not count as kept.
pub(crate) fn warn_of_damage<T>(world: &Group, path: &Path, found: &Result<T, String>) {
    if let (Err(why), 0) = (found, world.rank()) {
        let path = path.display();
        tracing::warn!("checkpoint {path} does not count towards the checkpoints to keep: {why}");
    }
}

/// Deletes a checkpoint. It is renamed first, so that a kill in the middle leaves no partial
/// checkpoint under a checkpoint's name.
pub(crate) fn delete(path: &Path) -> Result<(), CheckpointError> {
    if path.is_symlink() {
        return fs::remove_file(path).during("remove the link", path);
    }
    Mark::of_run(path).during("write into", path)?;
    let trash = sibling_path(path, TRASH);
    fs::rename(path, &trash).during("move aside", path)?;
    remove_marked(&trash);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kth_checkpoint_and_those_of_the_lowest_loss_are_kept() {
        let losses = [
            (10, 3.0),
            (20, 1.5),
            (30, f64::NAN),
            (40, 1.5),
            (50, 2.0),
            (60, 0.1),
        ];
        let kept = |every, best| {
            let retention = Retention {
                newest: 1,
                every,
                best,
                losses: losses.into(),
            };
            // Step 60 has a loss, but no checkpoint any more; step 45 was not evaluated.
            let kept = retention.kept([50, 45, 40, 30, 20, 10].into_iter());
            kept.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(kept(0, 0), [0; 0]);
        assert_eq!(kept(20, 0), [20, 40]);
        assert_eq!(kept(0, 1), [20], "the earlier one of equal losses");
        assert_eq!(kept(0, 3), [20, 40, 50]);
        assert_eq!(kept(15, 1), [20, 30, 45]);
        assert_eq!(kept(0, 9), [10, 20, 40, 50]);
    }
}

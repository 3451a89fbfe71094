//! Which checkpoints of a run stay after a new one was committed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use megaburn_collective::{Group, Progress, objects};

use crate::{
    agree::settle,
    checkpoint::Checkpoint,
    error::CheckpointError,
    folder::{checkpoint_path, committed},
    paths::is_there,
    place::Place,
    remove::remove_checkpoint,
    verification::verify,
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
    /// Steps whose checkpoints stay because they are in use.
    pub in_use: BTreeSet<u64>,
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
        let is_kept = |step: &u64| {
            let is_multiple = self.every > 0 && step.is_multiple_of(self.every);
            is_multiple || self.in_use.contains(step)
        };
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
pub(crate) type Known = (u64, Option<bool>);

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
    place: &Place,
    run_id: Option<&str>,
    current: u64,
    retention: &Retention,
    progress: &Progress,
) -> Result<(), CheckpointError> {
    if retention.newest == 0 {
        return Ok(());
    }
    loop {
        let mine = if place.is_keeper(world) {
            known(place, run_id, current, progress)
        } else {
            Ok(Vec::new())
        };
        let own = all_known(world, &settle(world, mine)?)?;
        let next = steps_to_verify(world, &own, retention)?;
        if next.is_empty() {
            let delete = steps_to_delete(world, &own, retention)?;
            let deleted = if place.is_keeper(world) {
                delete_steps(place, run_id, &delete)
            } else {
                Ok(())
            };
            return settle(world, deleted);
        }
        for step in next {
            verify(world, place, step, progress)?;
        }
    }
}

/// Tells all ranks which checkpoints must be verified before others are deleted. `own` counts on
/// rank 0.
///
/// # Collective
/// All ranks of `world`.
pub(crate) fn steps_to_verify(
    world: &Group,
    own: &[Known],
    retention: &Retention,
) -> Result<Vec<u64>, CheckpointError> {
    Ok(objects::broadcast(world, &unverified(own, retention))?)
}

/// Tells all ranks which checkpoints are to be deleted: none, unless all that count are verified.
/// `own` counts on rank 0.
///
/// # Collective
/// All ranks of `world`.
pub(crate) fn steps_to_delete(
    world: &Group,
    own: &[Known],
    retention: &Retention,
) -> Result<Vec<u64>, CheckpointError> {
    let steps = if unverified(own, retention).is_empty() {
        not_kept(own, retention)
    } else {
        Vec::new()
    };
    Ok(objects::broadcast(world, &steps)?)
}

/// Joins what the ranks know, on rank 0. A checkpoint that is damaged for one is damaged.
///
/// # Collective
/// All ranks of `world`; steps.
pub(crate) fn all_known(world: &Group, mine: &[Known]) -> Result<Vec<Known>, CheckpointError> {
    let all: Vec<Vec<Known>> = objects::gather(world, &mine.to_vec())?;
    let mut joined: BTreeMap<u64, Option<bool>> = BTreeMap::new();
    for (step, is_whole) in all.into_iter().flatten() {
        let known = joined.entry(step).or_insert(Some(true));
        *known = match (*known, is_whole) {
            (Some(true), other) | (other, Some(true)) => other,
            (Some(false), _) | (_, Some(false)) => Some(false),
            (None, None) => None,
        };
    }
    Ok(joined.into_iter().rev().collect())
}

/// Replaces what was known by what a later verification has found.
pub(crate) fn update(own: &mut [Known], place: &Place) {
    let verified = verified();
    for (step, is_whole) in own {
        let path = checkpoint_path(place.dir(), *step);
        *is_whole = is_whole.or_else(|| verified.get(&path).copied());
    }
}

/// Deletes the checkpoints of these steps that the run wrote, in this rank's folder.
pub(crate) fn delete_steps(
    place: &Place,
    run_id: Option<&str>,
    steps: &[u64],
) -> Result<(), CheckpointError> {
    for step in steps {
        let path = checkpoint_path(place.dir(), *step);
        // A host that lost its folder has fewer.
        let is_own = |found: Checkpoint| found.manifest().run_id.as_deref() == run_id;
        if is_there(&path) && Checkpoint::open_copy(&path).is_ok_and(is_own) {
            remove_checkpoint(&path)?;
        }
    }
    Ok(())
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

/// The steps of the checkpoints that are neither kept nor damaged.
fn not_kept(own: &[Known], retention: &Retention) -> Vec<u64> {
    if retention.newest == 0 {
        return Vec::new();
    }
    let own = own.iter().filter(|(_, is_whole)| *is_whole != Some(false));
    let own: Vec<u64> = own.map(|(step, _)| *step).collect();
    let others = retention.kept(own.iter().copied());
    let old = own.into_iter().skip(retention.newest);
    old.filter(|step| !others.contains(step)).collect()
}

/// The checkpoints that count for [`retain`], newest first. The one just written is known to be
/// intact.
pub(crate) fn known(
    place: &Place,
    run_id: Option<&str>,
    current: u64,
    progress: &Progress,
) -> Result<Vec<Known>, CheckpointError> {
    let dir = place.dir();
    let mut verified = verified();
    verified.remove(&checkpoint_path(dir, current));
    let past = committed(dir)?
        .into_iter()
        .filter(|(step, _)| *step <= current);
    let is_own = |path: &Path| {
        progress.add(0);
        let found = match place.hosts() {
            None => Checkpoint::open(path),
            Some(_) => Checkpoint::open_copy(path),
        };
        found.is_ok_and(|found| found.manifest().run_id.as_deref() == run_id)
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
        let kept_with = |every, best, in_use: Option<u64>| {
            let retention = Retention {
                newest: 1,
                every,
                best,
                losses: losses.into(),
                in_use: in_use.into_iter().collect(),
            };
            // Step 60 has a loss, but no checkpoint any more; step 45 was not evaluated.
            let kept = retention.kept([50, 45, 40, 30, 20, 10].into_iter());
            kept.into_iter().collect::<Vec<_>>()
        };
        let kept = |every, best| kept_with(every, best, None);
        assert_eq!(kept(0, 0), [0; 0]);
        assert_eq!(kept(20, 0), [20, 40]);
        assert_eq!(kept(0, 1), [20], "the earlier one of equal losses");
        assert_eq!(kept(0, 3), [20, 40, 50]);
        assert_eq!(kept(15, 1), [20, 30, 45]);
        assert_eq!(kept(0, 9), [10, 20, 40, 50]);
        // A checkpoint in use is none of the best; step 70 has no checkpoint.
        assert_eq!(kept_with(0, 1, Some(45)), [20, 45]);
        assert_eq!(kept_with(0, 1, Some(70)), [20]);
    }
}

//! Saves a checkpoint from all ranks of a run.

use std::{path::PathBuf, sync::atomic::AtomicBool};

use megaburn_collective::{Phase, ProcessGroups};

use crate::{
    error::CheckpointError,
    folder::checkpoint_path,
    named_tensor::{NamedTensor, Values},
    place::Place,
    retention::{Retention, retain},
    share::Share,
    snapshot::Snapshot,
    unfinished_checkpoint::{Guard, UnfinishedCheckpoint},
};

/// Saves a checkpoint to `step-XXXXXXXX` in a place and returns its path. A checkpoint of the same
/// step is replaced. With a `guard`, the folder of the place must exist and is not created.
///
/// Afterwards only the checkpoints that `retention` keeps remain of the run that `snapshot` names.
/// Before older ones are deleted, the ranks verify the remaining ones, each once per process.
///
/// Every element is written once. The ranks that hold copies of a piece each write an equal share
/// ([`WritePlan`](crate::WritePlan)) to a file of their own, and nothing is gathered. Only the
/// values that a rank writes are requested, one tensor at a time. Up to 256 MiB of tensors, or one
/// larger tensor, are in memory at once, because two threads hash and write those that were read while
/// the next ones are. In folders of the hosts, the files are then copied to other hosts.
///
/// # Errors
/// Any rank's failure or the guard's refusal, on every rank. The older checkpoints are then
/// unchanged, and nothing of the new one remains. Tensors that the ranks' pieces do not tile
/// exactly once are refused.
/// # Collective
/// All ranks of `groups.world`; a few messages, none with tensors. Each rank enters [`Phase::Save`]
/// and reports its progress.
pub fn save<'a>(
    place: impl Into<Place>,
    retention: &Retention,
    guard: Option<Guard<'_>>,
    groups: &ProcessGroups,
    snapshot: &Snapshot,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
) -> Result<PathBuf, CheckpointError> {
    let place = place.into();
    let world = &groups.world;
    let phase = world.phase(Phase::Save);
    let progress = phase.progress();
    let folder = UnfinishedCheckpoint::create(&place, guard, groups, snapshot.step)?;
    let share = Share::new(tensors, groups);
    let never = AtomicBool::new(false);
    let read = |values: Values<'_>, range| values(range)?();
    let mine =
        share.and_then(|share| share.write(folder.path(), world.rank(), read, progress, &never));
    folder.commit(guard, groups, snapshot, mine, progress)?;
    let run_id = snapshot.run_id.as_deref();
    let retained = retain(world, &place, run_id, snapshot.step, retention, progress);
    warn_of_retention(groups, retained);
    Ok(checkpoint_path(place.dir(), snapshot.step))
}

/// Old checkpoints that cannot be deleted do not fail a save.
pub(crate) fn warn_of_retention(groups: &ProcessGroups, retained: Result<(), CheckpointError>) {
    if let Err(error) = retained
        && groups.is_main()
    {
        tracing::warn!("old checkpoints were not deleted: {error}");
    }
}

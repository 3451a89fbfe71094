//! Verifies a checkpoint of a place with all ranks.

use std::path::Path;

use megaburn_collective::{Group, Progress};

use crate::{
    checkpoint::Checkpoint,
    error::CheckpointError,
    folder::checkpoint_path,
    hosts::{
        examine::{HostCopy, examine_copy},
        judge::judge_copies,
    },
    latest::{judge_together, verify_share},
    place::Place,
    verified::remember,
};

/// Verifies a checkpoint, and logs on rank 0 if it is damaged.
///
/// # Collective
/// All ranks of `world`.
pub(crate) fn verify(
    world: &Group,
    place: &Place,
    step: u64,
    progress: &Progress,
) -> Result<(), CheckpointError> {
    let path = checkpoint_path(place.dir(), step);
    let found = examine(place, world.rank(), world.size(), &path, progress);
    judge(world, place, &path, found)
}

/// A rank's findings in its part of a checkpoint.
pub(crate) enum Found {
    Shared(Box<Result<Checkpoint, CheckpointError>>),
    OfHost(Result<HostCopy, CheckpointError>),
}

/// Verifies this rank's part of a checkpoint: some of its files, or some of those of its host.
pub(crate) fn examine(
    place: &Place,
    rank: usize,
    num_ranks: usize,
    path: &Path,
    progress: &Progress,
) -> Found {
    match place.hosts() {
        None => Found::Shared(Box::new(verify_share(path, rank, num_ranks, progress))),
        Some(hosts) => Found::OfHost(examine_copy(path, hosts.local(rank), progress)),
    }
}

/// Agrees on whether a checkpoint is intact, and remembers it. Logs on rank 0 that a damaged one
/// does not count as kept.
///
/// # Collective
/// All ranks of `world`.
pub(crate) fn judge(
    world: &Group,
    place: &Place,
    path: &Path,
    found: Found,
) -> Result<(), CheckpointError> {
    let judged = match (found, place.hosts()) {
        (Found::OfHost(mine), Some(hosts)) => judge_copies(world, hosts, mine)?.map(drop),
        (Found::Shared(mine), _) => judge_together(world, path, *mine)?.map(drop),
        (Found::OfHost(mine), None) => mine.map(|_| Ok(()))?,
    };
    remember(path, judged.is_ok());
    if let (Err(why), 0) = (judged, world.rank()) {
        let path = path.display();
        tracing::warn!("checkpoint {path} does not count towards the checkpoints to keep: {why}");
    }
    Ok(())
}

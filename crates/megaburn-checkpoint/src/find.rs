//! Finds the newest checkpoint of a place.

use megaburn_collective::Group;

use crate::{
    error::CheckpointError,
    hosts,
    latest::{Latest, find_in_folder},
    place::Place,
};

/// Like [`newest_valid`](crate::newest_valid), for all ranks of a run. Rank 0 logs the warnings.
///
/// If each host has a folder of its own, a file must be intact on one host. Before tensors are read,
/// [`Checkpoint::fetch`](crate::Checkpoint::fetch) brings the files to the hosts that need them.
///
/// # Errors
/// As [`newest`](crate::newest); also a checkpoint in a shared folder that only some ranks see.
/// # Collective
/// All ranks of `world`. Each file is verified by one rank, and all ranks get the same result. Each
/// rank enters [`Phase::Load`](megaburn_collective::Phase) and reports its progress.
pub fn find_latest(place: impl Into<Place>, world: &Group) -> Result<Latest, CheckpointError> {
    let place = place.into();
    match place.hosts() {
        None => find_in_folder(place.dir(), world),
        Some(hosts) => hosts::latest::find_latest(&place, hosts, world),
    }
}

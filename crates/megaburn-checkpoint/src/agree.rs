//! Small messages between all ranks: member 0 hears everyone and tells everyone.

use megaburn_collective::{CollectiveError, Group, objects};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;

/// The first failure of any rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) message: String,
}

/// Whether all ranks came through: none, or the failure of the lowest rank that did not. The
/// answer is the same on every rank.
///
/// # Collective
/// All members; a few bytes.
pub(crate) fn first_failure(
    world: &Group,
    mine: Option<&CheckpointError>,
) -> Result<Option<Failure>, CollectiveError> {
    let mine = mine.map(ToString::to_string);
    let all: Vec<Option<String>> = objects::gather(world, &mine)?;
    let failed = |(rank, message): (usize, Option<String>)| {
        message.map(|message| Failure { rank: world.members()[rank], message })
    };
    let first = all.into_iter().enumerate().find_map(failed);
    objects::broadcast(world, &first)
}

/// Turns one rank's result into everyone's: a rank that failed keeps its own error, the others get
/// an error that carries it.
///
/// # Collective
/// All members; a few bytes.
pub(crate) fn settle<T>(
    world: &Group,
    mine: Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    let failure = first_failure(world, mine.as_ref().err())?;
    let value = mine?;
    match failure {
        Some(Failure { rank, message }) => Err(CheckpointError::Peer { rank, message }),
        None => Ok(value),
    }
}

//! Small messages between all ranks: member 0 gathers from all members and broadcasts to all.

use megaburn_collective::{CollectiveError, Group, objects};
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;

/// The failure of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) message: String,
    /// See [`CheckpointError::is_damage`].
    pub(crate) is_damage: bool,
    /// See [`CheckpointError::is_not_finite`].
    pub(crate) is_not_finite: bool,
}

/// Returns `None` if no rank failed, otherwise one rank's failure. Failures that are not damage
/// take precedence over damage; among equals, the lowest rank's failure is returned. The result is
/// the same on every rank.
///
/// # Collective
/// All members; a few bytes.
pub(crate) fn first_failure(
    world: &Group,
    mine: Option<&CheckpointError>,
) -> Result<Option<Failure>, CollectiveError> {
    let mine = mine.map(|error| Failure {
        rank: world.global_rank(),
        message: error.to_string(),
        is_damage: error.is_damage(),
        is_not_finite: error.is_not_finite(),
    });
    let all: Vec<Option<Failure>> = objects::gather(world, &mine)?;
    let first = all.into_iter().flatten().min_by_key(|f| f.is_damage);
    objects::broadcast(world, &first)
}

/// Agrees on one result: a rank that failed returns its own error, and the others return an error
/// that carries it.
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
        Some(Failure {
            rank,
            message,
            is_damage,
            is_not_finite,
        }) => Err(CheckpointError::Peer {
            rank,
            message,
            is_damage,
            is_not_finite,
        }),
        None => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use std::{io, path::PathBuf};

    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;

    /// If one rank finds damage and another cannot read, the damage is not proven.
    #[test]
    fn a_rank_that_cannot_read_outweighs_one_that_finds_damage() {
        let damaged = || {
            Some(CheckpointError::Damaged {
                file: "a".into(),
                why: "cut".into(),
            })
        };
        let refused = || {
            let source = io::ErrorKind::PermissionDenied.into();
            Some(CheckpointError::Io {
                action: "read",
                path: PathBuf::from("b"),
                source,
            })
        };
        let cases = [
            ([None, None, None], None),
            ([None, damaged(), damaged()], Some((1, true))),
            ([damaged(), None, refused()], Some((2, false))),
        ];
        for (errors, expected) in cases {
            let found = run_threads(3, GroupOptions::default(), |world| {
                first_failure(&world, errors[world.rank()].as_ref())
            });
            for found in found {
                let found = found
                    .unwrap()
                    .map(|failure| (failure.rank, failure.is_damage));
                assert_eq!(found, expected);
            }
        }
    }
}

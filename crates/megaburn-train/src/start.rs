//! How ranks start together: a failure of one ends all, with its error and its exit code.

use std::time::Duration;

use burn::tensor::TensorData;
use megaburn_collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, RankEnv, objects,
    report_start_failure as report,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::{config::TrainConfig, error::TrainError};

/// How long a rank that cannot start waits for the other ranks to connect. All ranks are started at
/// nearly the same time, and the launcher waits for this process to end.
const OTHERS_COME: Duration = Duration::from_secs(30);

/// Notifies the other ranks of this job, if a launcher started several, that this rank cannot
/// start, so that they end with its error instead of waiting for it. For failures before a run
/// begins; [`pretrain`](crate::pretrain) does this itself.
///
/// Returns the error after the other ranks were notified or did not connect in time.
pub fn report_start_failure(error: TrainError) -> TrainError {
    match RankEnv::from_env() {
        Ok(Some(env)) => tell(env, TrainConfig::default().group_options(), error),
        _ => error,
    }
}

/// As [`report_start_failure`], for a run whose time limits are known.
pub(crate) fn tell(env: RankEnv, group: GroupOptions, error: TrainError) -> TrainError {
    if env.world_size > 1 {
        tracing::error!(
            "rank {} cannot start and notifies the other ranks: {error}",
            env.rank
        );
        let code = error.exit().code().into();
        let patience = group.phases.start.min(OTHERS_COME);
        let options = options(env, group).with_rendezvous_timeout(patience);
        report(&options, &error.to_string(), code);
    }
    error
}

/// How the processes of a run connect.
pub(crate) fn options(env: RankEnv, group: GroupOptions) -> ConnectOptions {
    let patience = group.phases.start;
    ConnectOptions::new(env)
        .with_group(group)
        .with_rendezvous_timeout(patience)
}

/// Makes all ranks agree on the outcome: a rank that failed returns its own error, and the others
/// return the error of the lowest rank that failed.
///
/// # Errors
/// As described; also a failed collective.
/// # Collective
/// All ranks; a few bytes.
pub(crate) fn settle<T>(world: &Group, mine: Result<T, TrainError>) -> Result<T, TrainError> {
    let said = mine
        .as_ref()
        .err()
        .map(|error| (error.to_string(), error.exit().code()));
    let first = first_failure(world, said);
    // If this rank's error is a failed collective, the ranks cannot agree on anything any more.
    let value = mine?;
    match first? {
        None => Ok(value),
        Some((rank, (why, code))) => Err(CollectiveError::CannotStart {
            rank,
            why,
            code: code.into(),
        }
        .into()),
    }
}

/// Checks that all ranks have the same `text`, which describes their configuration and their data,
/// because otherwise they would silently compute different things.
///
/// # Errors
/// Another text than that of rank 0, on the ranks that have it; a failed collective.
/// # Collective
/// All ranks; a hash.
pub(crate) fn agree_on(world: &Group, text: &str) -> Result<(), TrainError> {
    let mine = TensorData::from([xxh3_64(text.as_bytes()) as i64]);
    if world.broadcast(mine.clone(), 0)? == mine {
        return Ok(());
    }
    Err(TrainError::OtherConfig { rank: world.rank() })
}

/// The text of an error, and its exit code.
type StartReport = (String, u8);

/// The lowest rank that reported an error, and the report.
fn first_failure(
    world: &Group,
    said: Option<StartReport>,
) -> Result<Option<(usize, StartReport)>, CollectiveError> {
    let all = objects::gather(world, &said)?;
    let first = all
        .into_iter()
        .enumerate()
        .find_map(|(rank, said)| Some((rank, said?)));
    objects::broadcast(world, &first)
}

#[cfg(test)]
mod tests {
    use megaburn_collective::run_threads;

    use super::*;
    use crate::exit::Exit;

    #[test]
    fn what_one_rank_cannot_do_ends_all_with_its_error_and_its_code() {
        let ends = run_threads(3, GroupOptions::default(), |world| {
            let found = settle(&world, Ok(world.rank()))?;
            assert_eq!(found, world.rank());
            let mine = match world.rank() {
                1 => Err(TrainError::Set { text: "abc".into() }),
                _ => Ok(()),
            };
            let error = settle(&world, mine).unwrap_err();
            Ok::<_, TrainError>((error.to_string(), error.exit()))
        });
        for (rank, end) in ends.into_iter().enumerate() {
            let (text, exit) = end.unwrap();
            assert_eq!(exit, Exit::BadInput, "{text}");
            let own = "`--set abc` is not KEY=VALUE";
            let expected = if rank == 1 {
                own.to_string()
            } else {
                format!("rank 1 cannot start: {own}")
            };
            assert!(text.starts_with(&expected), "{text}");
        }
    }
}

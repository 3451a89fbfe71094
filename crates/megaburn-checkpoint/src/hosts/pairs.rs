//! Runs transfers between pairs of ranks, of which each rank does its part.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
    thread,
};

use megaburn_collective::Group;

use crate::error::CheckpointError;

/// Pairs of ranks for which a rank works at a time.
const AT_ONCE: usize = 8;

/// The name of the threads that do so.
const NAME: &str = "checkpoint-transfer";

/// Does what this rank of `group` has to do for the transfers `all`. `ends` gives the ranks that
/// send and receive a transfer, and `one` does this rank's part of it and returns the bytes that
/// this rank received. This thread and up to seven others each work for a pair of ranks, in an order
/// that all ranks agree on. If the system has fewer threads left, pairs wait longer. Returns the
/// bytes that this rank received from each rank.
///
/// # Errors
/// The first error of `one`. All other transfers of this rank are done, unless a rank is gone. If
/// `one` panics, the collectives of all ranks end with an error.
/// # Collective
/// All ranks that send or receive, at nearly the same time, with the same list.
pub(crate) fn run_pairs<T: Sync>(
    group: &Group,
    all: &[T],
    ends: impl Fn(&T) -> (usize, usize),
    one: impl Fn(&T) -> Result<u64, CheckpointError> + Sync,
) -> Result<BTreeMap<usize, u64>, CheckpointError> {
    run_pairs_on(AT_ONCE, group, all, ends, one)
}

/// As [`run_pairs`], for at most `at_once` pairs at a time.
fn run_pairs_on<T: Sync>(
    at_once: usize,
    group: &Group,
    all: &[T],
    ends: impl Fn(&T) -> (usize, usize),
    one: impl Fn(&T) -> Result<u64, CheckpointError> + Sync,
) -> Result<BTreeMap<usize, u64>, CheckpointError> {
    let me = group.rank();
    let mut pairs: BTreeMap<(usize, usize), Vec<&T>> = BTreeMap::new();
    for transfer in all {
        let (from, to) = ends(transfer);
        if from == me || to == me {
            pairs.entry((from, to)).or_default().push(transfer);
        }
    }
    let received = Mutex::new(BTreeMap::new());
    let one = |transfer: &T| {
        // The rank at the other end waits for this one.
        let panicked = |_| {
            group.abort("its transfer of files of a checkpoint panicked");
            Err(CheckpointError::Panicked { thread: NAME })
        };
        catch_unwind(AssertUnwindSafe(|| one(transfer))).unwrap_or_else(panicked)
    };
    let one_pair = |(from, _): (usize, usize), transfers: Vec<&T>| {
        let mut failed = Ok(());
        for transfer in transfers {
            match one(transfer) {
                Err(error) if is_end(&error) => return Err(error),
                Err(error) => failed = failed.and(Err(error)),
                Ok(0) => {}
                Ok(bytes) => {
                    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
                    *received.entry(from).or_default() += bytes;
                }
            }
        }
        failed
    };
    let num_threads = pairs.len().min(at_once);
    // The first pair that is left has both of its ranks, so no rank waits for ever.
    let left = Mutex::new(pairs.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut failed = Ok(());
        while let Some((pair, transfers)) = next() {
            match one_pair(pair, transfers) {
                Err(error) if is_end(&error) => return Err(error),
                done => failed = failed.and(done),
            }
        }
        failed
    };
    let ended: Result<(), CheckpointError> = thread::scope(|scope| {
        let spawn = |_| {
            let builder = thread::Builder::new().name(NAME.into());
            builder.spawn_scoped(scope, work).ok()
        };
        let threads: Vec<_> = (1..num_threads).filter_map(spawn).collect();
        let own = work();
        let ends = threads.into_iter().map(|thread| {
            let panicked = Err(CheckpointError::Panicked { thread: NAME });
            thread.join().unwrap_or(panicked)
        });
        // All threads end before the first error is returned.
        let ends: Vec<_> = [own].into_iter().chain(ends).collect();
        ends.into_iter().collect()
    });
    ended?;
    Ok(received
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner))
}

/// Whether no transfer can follow after an error, because a rank is gone.
fn is_end(error: &CheckpointError) -> bool {
    matches!(
        error,
        CheckpointError::Collective(_) | CheckpointError::Panicked { .. }
    )
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use burn::tensor::{DType, TensorData};
    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;

    /// All pairs of `num_ranks` ranks, twice.
    fn all_pairs(num_ranks: usize) -> Vec<(usize, usize)> {
        let pairs = (0..num_ranks).flat_map(|from| (0..num_ranks).map(move |to| (from, to)));
        let pairs: Vec<_> = pairs.filter(|(from, to)| from != to).collect();
        pairs.repeat(2)
    }

    /// Sends a byte from one rank to another.
    fn transfer(group: &Group, (from, to): (usize, usize)) -> Result<u64, CheckpointError> {
        if from == group.rank() {
            group.send(TensorData::from([from as u8]), to)?;
            return Ok(0);
        }
        let found = group.recv(from, Some(&[1]), DType::U8)?;
        assert_eq!(found.as_bytes(), [from as u8]);
        Ok(1)
    }

    #[test]
    fn ranks_with_different_numbers_of_threads_transfer_everything() {
        let num_ranks = 5;
        let found = run_threads(num_ranks, GroupOptions::default(), |world| {
            let at_once = [1, 8, 2, 1, 3][world.rank()];
            let one = |pair: &(usize, usize)| transfer(&world, *pair);
            run_pairs_on(at_once, &world, &all_pairs(num_ranks), |pair| *pair, one)
        });
        for (rank, received) in found.into_iter().enumerate() {
            let others = (0..num_ranks).filter(|from| *from != rank);
            assert_eq!(received.unwrap(), others.map(|from| (from, 2)).collect());
        }
    }

    #[test]
    fn a_panic_ends_the_transfers_of_all_ranks_with_an_error() {
        let begun = Instant::now();
        let found = run_threads(3, GroupOptions::default(), |world| {
            let one = |pair: &(usize, usize)| {
                assert!(*pair != (0, 1) || world.rank() != 0, "a panic of a test");
                transfer(&world, *pair)
            };
            run_pairs(&world, &all_pairs(3), |pair| *pair, one)?;
            Ok::<_, CheckpointError>(world.barrier()?)
        });
        for rank in found {
            let error = rank.unwrap_err().to_string();
            assert!(error.contains("panicked"), "{error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

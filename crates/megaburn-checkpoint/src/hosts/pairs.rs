//! Runs transfers between pairs of ranks, of which each rank does its part.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    thread,
};

use crate::error::CheckpointError;

/// Pairs of ranks for which a rank works at a time.
const AT_ONCE: usize = 8;

/// The name of the threads that do so.
const NAME: &str = "checkpoint-transfer";

/// Does what rank `me` has to do for the transfers `all`. `ends` gives the ranks that send and
/// receive a transfer, and `one` does this rank's part of it and returns the bytes that this rank
/// received. A thread works for each pair of ranks, for at most [`AT_ONCE`] pairs at a time, in an
/// order that all ranks agree on. Returns the bytes that this rank received from each rank.
///
/// # Errors
/// The first error of `one`. All other transfers of this rank are done, unless a rank is gone.
/// # Collective
/// All ranks that send or receive, at nearly the same time, with the same list.
pub(crate) fn run_pairs<T: Sync>(
    me: usize,
    all: &[T],
    ends: impl Fn(&T) -> (usize, usize),
    one: impl Fn(&T) -> Result<u64, CheckpointError> + Sync,
) -> Result<BTreeMap<usize, u64>, CheckpointError> {
    let mut pairs: BTreeMap<(usize, usize), Vec<&T>> = BTreeMap::new();
    for transfer in all {
        let (from, to) = ends(transfer);
        if from == me || to == me {
            pairs.entry((from, to)).or_default().push(transfer);
        }
    }
    let received = Mutex::new(BTreeMap::new());
    let one_pair = |(from, _): (usize, usize), transfers: Vec<&T>| {
        let mut failed = Ok(());
        for transfer in transfers {
            match one(transfer) {
                Err(error @ CheckpointError::Collective(_)) => return Err(error),
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
    let num_threads = pairs.len().min(AT_ONCE);
    // The first pair that is left has both of its ranks, so no rank waits for ever.
    let left = Mutex::new(pairs.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut failed = Ok(());
        while let Some((pair, transfers)) = next() {
            match one_pair(pair, transfers) {
                Err(error @ CheckpointError::Collective(_)) => return Err(error),
                done => failed = failed.and(done),
            }
        }
        failed
    };
    let ended: Result<(), CheckpointError> = thread::scope(|scope| {
        let spawn = |_| {
            let builder = thread::Builder::new().name(NAME.into());
            builder.spawn_scoped(scope, work)
        };
        let threads: Vec<_> = (0..num_threads).map(spawn).collect();
        let ends = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread
                .join()
                .unwrap_or(Err(CheckpointError::Panicked { thread: NAME })),
            Err(source) => Err(CheckpointError::NoThread { source }),
        });
        // All threads end before the first error is returned.
        ends.collect::<Vec<_>>().into_iter().collect()
    });
    ended?;
    Ok(received
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner))
}

//! How far the clocks of the hosts are from that of rank 0.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use burn::tensor::{DType, TensorData};
use megaburn_collective::{CollectiveError, Group};

/// Questions to each host; the answer that came fastest counts.
const QUESTIONS: usize = 8;

/// How far the clock of this rank is ahead of that of rank 0, in seconds. `askers` are the ranks
/// that ask, one of each host; the others get `None`, and rank 0 gets 0. The error is at most half
/// the time that an answer takes.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All ranks, with the same `askers`; each asker sends a few bytes to rank 0 and back.
pub(crate) fn ahead_of_rank_0(
    world: &Group,
    askers: &[usize],
    clock: impl Fn() -> i64,
) -> Result<Option<f64>, CollectiveError> {
    let nanoseconds = |data: TensorData| data.iter::<i64>().next().unwrap_or(0);
    if world.rank() == 0 {
        for &asker in askers.iter().filter(|asker| **asker != 0) {
            for _ in 0..QUESTIONS {
                world.recv(asker, Some(&[1]), DType::I64)?;
                world.send(TensorData::from([clock()]), asker)?;
            }
        }
        return Ok(Some(0.0));
    }
    if !askers.contains(&world.rank()) {
        return Ok(None);
    }
    let mut best: Option<(u128, f64)> = None;
    for _ in 0..QUESTIONS {
        let (asked, start) = (clock(), Instant::now());
        world.send(TensorData::from([asked]), 0)?;
        let theirs = nanoseconds(world.recv(0, Some(&[1]), DType::I64)?);
        let taken = start.elapsed().as_nanos();
        // The answer was given in the middle of that time, as far as can be known.
        let middle = asked as f64 + taken as f64 / 2.0;
        let ahead = (middle - theirs as f64) / 1e9;
        if best.is_none_or(|(least, _)| taken < least) {
            best = Some((taken, ahead));
        }
    }
    Ok(best.map(|(_, ahead)| ahead))
}

/// The system's clock, in nanoseconds.
pub(crate) fn system_clock() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as i64)
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;

    #[test]
    fn a_clock_that_is_ahead_is_measured() {
        let found = run_threads(3, GroupOptions::default(), |world| {
            let shift = world.rank() as i64 * 90_000_000_000;
            ahead_of_rank_0(&world, &[0, 2], || system_clock() + shift)
        });
        let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        assert_eq!(found[..2], [Some(0.0), None]);
        let ahead = found[2].unwrap();
        assert!((ahead - 180.0).abs() < 0.5, "{ahead}");
    }
}

//! How the clocks of ranks differ.

use burn::tensor::{DType, TensorData};
use megaburn_collective::{CollectiveError, Group, host_name, objects};
use megaburn_report::profile::now_ns;

/// The number of messages that go to rank 0 and back; the fastest counts.
const ROUNDS: usize = 8;

/// The nanoseconds to add to this rank's clock of profiles to get rank 0's. It is wrong by at most
/// half the time that a message takes to rank 0 and back. Ranks of one process have one clock.
///
/// # Errors
/// A failed collective.
/// # Collective
/// All members of `world`; some messages between rank 0 and each other one.
pub(super) fn offset_to_rank_0(world: &Group) -> Result<i64, CollectiveError> {
    let own = (host_name(), std::process::id());
    let shares_clock = objects::broadcast(world, &own)? == own;
    let mut offset = 0;
    for peer in 1..world.size() {
        if world.rank() == 0 {
            for _ in 0..ROUNDS {
                world.recv(peer, None, DType::I64)?;
                world.send(time(), peer)?;
            }
        } else if world.rank() == peer {
            offset = measured(world)?;
        }
    }
    Ok(if shares_clock { 0 } else { offset })
}

fn measured(world: &Group) -> Result<i64, CollectiveError> {
    let mut best = (u64::MAX, 0);
    for _ in 0..ROUNDS {
        let sent = now_ns();
        world.send(time(), 0)?;
        let theirs = world.recv(0, None, DType::I64)?;
        let received = now_ns();
        let theirs = theirs.as_slice::<i64>().map_or(0, |theirs| theirs[0]);
        let middle = (sent + received) / 2;
        best = best.min((received - sent, theirs.wrapping_sub(middle as i64)));
    }
    Ok(best.1)
}

fn time() -> TensorData {
    TensorData::from([now_ns() as i64])
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;

    #[test]
    fn ranks_of_a_process_have_one_clock_and_messages_measure_it() {
        let found = run_threads(3, GroupOptions::default(), |world| {
            let offset = offset_to_rank_0(&world)?;
            // The same messages, whose result is not replaced by 0.
            let measured = match world.rank() {
                0 => {
                    for peer in [1, 2] {
                        for _ in 0..ROUNDS {
                            world.recv(peer, None, DType::I64)?;
                            world.send(time(), peer)?;
                        }
                    }
                    0
                }
                _ => measured(&world)?,
            };
            Ok::<_, CollectiveError>((offset, measured))
        });
        for rank in found {
            let (offset, measured) = rank.unwrap();
            assert_eq!(offset, 0);
            assert!(measured.abs() < 100_000_000, "{measured} ns");
        }
    }
}

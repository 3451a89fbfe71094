//! Worlds of more ranks than have connections to each other: what concerns all ranks travels along a
//! tree. Rank 0 is its root; in a world of nine, ranks 4 to 6 and the last two have no rank below.

mod fixture;

use std::{
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{DType, TensorData};
use fixture::{
    Over, bounded, impatient,
    misdeed::{Misdeed, misbehave},
    world,
};
use megaburn_collective::{CollectiveError, Group, RankFailure, ReduceOp, objects};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);
/// Longer than any of these tests should take; reaching it means that a rank waited for a timeout.
const PATIENT: f64 = 40.0;
const SIZE: usize = 9;

type Ends = Vec<Result<CollectiveError, RankFailure<CollectiveError>>>;

fn until_it_fails(world: &Group) -> CollectiveError {
    loop {
        if let Err(error) = world.barrier() {
            return error;
        }
    }
}

/// Checks that every rank but `culprit` has an error that names it.
fn check_all_but(culprit: usize, ends: &Ends) {
    for (rank, end) in ends.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
        let text = end
            .as_ref()
            .unwrap_or_else(|end| panic!("{end}"))
            .to_string();
        assert!(
            text.contains(&format!("rank {culprit}")),
            "rank {rank}: {text}"
        );
    }
}

#[rstest]
fn a_rank_that_goes_is_named_by_those_far_from_it(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(Misdeed::Panics, Misdeed::Fails, Misdeed::Returns, Misdeed::Aborts)] misdeed: Misdeed,
) {
    for culprit in [0, 1, SIZE - 1] {
        let begin = Instant::now();
        let ends = bounded(LIMIT, move || {
            world(over, SIZE, impatient(PATIENT), |world| {
                let before = world.barrier();
                if world.rank() == culprit {
                    return before.and_then(|()| misbehave(misdeed, &world));
                }
                Ok(before.err().unwrap_or_else(|| until_it_fails(&world)))
            })
        });
        check_all_but(culprit, &ends);
        assert!(begin.elapsed().as_secs_f64() < PATIENT / 2.0, "a timeout");
    }
}

/// Rank 0 waits for rank 1, which waits for rank 3, which waits for rank 7.
#[rstest]
fn a_silent_rank_is_named_by_those_far_from_it(#[values(Over::Threads, Over::Tcp)] over: Over) {
    const TIMEOUT: f64 = 0.6;
    let ends = bounded(LIMIT, move || {
        world(over, SIZE, impatient(TIMEOUT), |world| {
            world.barrier()?;
            if world.rank() == 7 {
                thread::sleep(Duration::from_secs_f64(4.0 * TIMEOUT));
            }
            Ok(until_it_fails(&world))
        })
    });
    check_all_but(7, &ends);
}

/// What a group exchanges opens connections between its members, and agreement of all ranks opens
/// none.
#[cfg(target_os = "linux")]
#[test]
fn a_rank_has_three_connections_and_those_of_its_groups() {
    const RANKS: usize = 100;
    let worlds = bounded(LIMIT, || {
        world(Over::Tcp, RANKS, impatient(PATIENT), |world| {
            let all = objects::gather(&world, &world.rank())?;
            let count = objects::broadcast(&world, &all.len())?;
            let mine = TensorData::from([world.rank() as i64]);
            let sum = world.all_reduce(mine, ReduceOp::Sum)?;
            world.barrier()?;
            // One rank counts while the others wait.
            let of_tree = (world.rank() == 0).then(connections);
            world.barrier()?;
            let first = world.rank() / 2 * 2;
            let pair = world.subgroup("pair", &[first, first + 1])?;
            pair.all_gather(TensorData::from([1f32]))?;
            world.barrier()?;
            let of_pairs = (world.rank() == 0).then(connections);
            world.barrier()?;
            Ok::<_, CollectiveError>((count, sum.iter::<i64>().next(), of_tree, of_pairs))
        })
    });
    let (count, sum, of_tree, of_pairs) = worlds[0].as_ref().unwrap();
    assert_eq!(
        (*count, *sum),
        (RANKS, Some((RANKS * (RANKS - 1) / 2) as i64))
    );
    // Both ends of a connection are here, and a tree has an edge less than ranks.
    let ends = 2 * (RANKS - 1);
    let (of_tree, of_pairs) = (of_tree.unwrap(), of_pairs.unwrap());
    assert!(of_tree >= ends, "{of_tree}");
    // Other tests of this program have connections too, and so do the pairs.
    assert!(of_pairs >= of_tree, "{of_pairs} {of_tree}");
    assert!(of_pairs < RANKS * RANKS / 4, "{of_pairs}: a mesh");
}

/// The number of sockets of this program.
#[cfg(target_os = "linux")]
fn connections() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    links
        .filter(|link| link.to_string_lossy().starts_with("socket:"))
        .count()
}

#[test]
fn all_can_meet_all() {
    let ends = bounded(LIMIT, || {
        world(Over::Tcp, SIZE, impatient(PATIENT), |world| {
            world.meet_all()?;
            let next = (world.rank() + 4) % SIZE;
            world.send(TensorData::from([world.rank() as i64]), next)?;
            let from = (world.rank() + SIZE - 4) % SIZE;
            let got = world.recv(from, Some(&[1]), DType::I64)?;
            assert_eq!(got.iter::<i64>().next(), Some(from as i64));
            Ok::<_, CollectiveError>(())
        })
    });
    ends.into_iter().for_each(|end| end.unwrap());
}

//! Ranks that disagree, die or fall silent: every other rank gets an error that names them, in
//! time.

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
use megaburn_collective::{CollectiveError, Group, RankFailure, ReduceOp};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);
/// Longer than any of these tests should take; reaching it means that a rank waited for a timeout.
const PATIENT: f64 = 40.0;

type Ends = Vec<Result<CollectiveError, RankFailure<CollectiveError>>>;
type Operation = fn(&Group) -> Result<(), CollectiveError>;

fn zeros(count: usize) -> TensorData {
    TensorData::new(vec![0f32; count], [count])
}

fn next(group: &Group) -> usize {
    (group.rank() + 1) % group.size()
}

const OPERATIONS: [(&str, Operation); 9] = [
    ("small all_reduce", |g| {
        g.all_reduce(zeros(3), ReduceOp::Sum).map(drop)
    }),
    ("large all_reduce", |g| {
        g.all_reduce(zeros(50_001), ReduceOp::Max).map(drop)
    }),
    ("all_gather", |g| g.all_gather(zeros(5)).map(drop)),
    ("reduce_scatter", |g| {
        g.reduce_scatter(zeros(12), ReduceOp::Mean).map(drop)
    }),
    ("all_to_all", |g| {
        g.all_to_all((0..g.size()).map(zeros).collect()).map(drop)
    }),
    ("broadcast", |g| g.broadcast(zeros(4), 0).map(drop)),
    ("barrier", Group::barrier),
    ("send", |g| g.send(zeros(2), next(g))),
    ("recv", |g| {
        g.recv((g.rank() + g.size() - 1) % g.size(), None, DType::F32)
            .map(drop)
    }),
];

/// Calls an operation until it fails, as a training loop would.
fn until_it_fails(group: &Group, operation: Operation) -> CollectiveError {
    loop {
        if let Err(error) = operation(group) {
            return error;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Checks that every rank but `unresponsive_peer` has an error that names it, and that its groups
/// are unusable.
fn check_all_but(unresponsive_peer: usize, ends: &Ends, what: &str) {
    for (rank, end) in ends
        .iter()
        .enumerate()
        .filter(|(rank, _)| *rank != unresponsive_peer)
    {
        let text = end
            .as_ref()
            .unwrap_or_else(|end| panic!("{what}: {end}"))
            .to_string();
        assert!(
            text.contains(&format!("rank {unresponsive_peer}")),
            "{what}: rank {rank}: {text}"
        );
        assert!(
            text.contains(&format!("rank {rank}, group ")),
            "{what}: rank {rank}: {text}"
        );
    }
}

fn check_unusable(group: &Group, first: &CollectiveError) {
    let CollectiveError::Unusable { first: kept, .. } = group.barrier().unwrap_err() else {
        panic!("a group is unusable after a failure");
    };
    assert_eq!(&*kept, first);
    assert_eq!(group.failure().as_ref(), Some(first));
    assert!(
        group.flight_dump().contains("FAILED"),
        "{}",
        group.flight_dump()
    );
}

#[rstest]
fn a_rank_that_goes_ends_the_others_in_any_operation(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(Misdeed::Panics, Misdeed::Fails, Misdeed::Returns, Misdeed::Aborts)] misdeed: Misdeed,
) {
    for (name, operation) in OPERATIONS {
        let begin = Instant::now();
        let ends = bounded(LIMIT, move || {
            world(over, 3, impatient(PATIENT), |group| {
                // The failing rank may be gone before the others have finished what it did with
                // them.
                let before = OPERATIONS[..7]
                    .iter()
                    .try_for_each(|(_, before)| before(&group));
                if group.rank() == 1 {
                    return before.and_then(|()| misbehave(misdeed, &group));
                }
                let error = before
                    .err()
                    .unwrap_or_else(|| until_it_fails(&group, operation));
                check_unusable(&group, &error);
                Ok(error)
            })
        });
        check_all_but(1, &ends, &format!("{misdeed:?} before {name}"));
        assert!(
            begin.elapsed().as_secs_f64() < PATIENT / 2.0,
            "{misdeed:?} {name}: a timeout"
        );
    }
}

#[rstest]
fn a_failure_in_one_subgroup_reaches_those_outside(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(Misdeed::Panics, Misdeed::Fails, Misdeed::Returns)] misdeed: Misdeed,
) {
    let ends = bounded(LIMIT, move || {
        world(over, 4, impatient(PATIENT), |world| {
            let members = if world.rank() < 2 { [0, 1] } else { [2, 3] };
            let group = world.subgroup("pair", &members)?;
            let before = group.barrier();
            if world.rank() == 1 {
                return before.and_then(|()| misbehave(misdeed, &group));
            }
            let error = before
                .err()
                .unwrap_or_else(|| until_it_fails(&group, Group::barrier));
            check_unusable(&world, &error);
            Ok(error)
        })
    });
    check_all_but(1, &ends, &format!("{misdeed:?}"));
}

/// When one rank is stopped, all waits time out at once, and a rank must not blame a peer that is
/// waiting itself. Here rank 0 waits for rank 1, which waits for rank 2, and so on to the last
/// rank, which is silent. Each rank begins a little later than the rank that waits for it.
#[rstest]
fn who_waits_for_one_that_waits_blames_the_silent_one(
    #[values(Over::Threads, Over::Tcp)] over: Over,
) {
    const SIZE: usize = 4;
    const TIMEOUT: f64 = 1.0;
    let ends = bounded(LIMIT, move || {
        world(over, SIZE, impatient(TIMEOUT), |group| {
            group.barrier()?;
            let rank = group.rank();
            if rank == SIZE - 1 {
                thread::sleep(Duration::from_secs_f64(2.5 * TIMEOUT));
                return Ok(until_it_fails(&group, Group::barrier));
            }
            thread::sleep(Duration::from_millis(100 * rank as u64));
            Ok(until_it_fails(&group, |group| {
                group.recv(group.rank() + 1, None, DType::F32).map(drop)
            }))
        })
    });
    check_all_but(SIZE - 1, &ends, "a chain");
}

/// Two ranks that wait for each other have no third rank to blame.
#[rstest]
fn who_waits_for_each_other_is_told_so(#[values(Over::Threads, Over::Tcp)] over: Over) {
    let ends = bounded(LIMIT, move || {
        world(over, 2, impatient(0.5), |group| {
            let each_other =
                |group: &Group| group.recv(1 - group.rank(), None, DType::F32).map(drop);
            Ok::<_, CollectiveError>(until_it_fails(&group, each_other))
        })
    });
    let texts: Vec<_> = ends
        .iter()
        .map(|end| end.as_ref().unwrap().to_string())
        .collect();
    assert!(
        texts
            .iter()
            .any(|text| text.contains("timed out after 0.5 s")),
        "{texts:?}"
    );
}

#[rstest]
fn a_silent_rank_is_a_timeout_in_any_operation(#[values(Over::Threads, Over::Tcp)] over: Over) {
    const TIMEOUT: f64 = 1.0;
    // A send returns when its data is handed over, so it alone cannot time out.
    for (name, operation) in OPERATIONS.into_iter().filter(|(name, _)| *name != "send") {
        let ends = bounded(LIMIT, move || {
            world(over, 3, impatient(TIMEOUT), |group| {
                group.barrier()?;
                if group.rank() == 1 {
                    thread::sleep(Duration::from_secs_f64(2.5 * TIMEOUT));
                    return Ok(until_it_fails(&group, Group::barrier));
                }
                let begin = Instant::now();
                let error = until_it_fails(&group, operation);
                let took = begin.elapsed().as_secs_f64();
                assert!(took < TIMEOUT + 5.0, "{name} failed after {took} s");
                check_unusable(&group, &error);
                Ok(error)
            })
        });
        check_all_but(1, &ends, name);
        assert!(ends.iter().all(Result::is_ok), "{name}: {ends:?}");
        let texts: Vec<_> = ends
            .iter()
            .map(|end| end.as_ref().unwrap().to_string())
            .collect();
        assert!(
            texts
                .iter()
                .any(|text| text.contains("timed out after 1.0 s")),
            "{texts:?}"
        );
    }
}

/// Two mismatched calls, each with its name in the error.
type Disagreement = ((Operation, &'static str), (Operation, &'static str));

const DISAGREEMENTS: [Disagreement; 8] = [
    (
        (
            |g| g.all_reduce(zeros(3), ReduceOp::Sum).map(drop),
            "all_reduce(sum) #0 of F32 [3]",
        ),
        (
            |g| g.all_gather(zeros(3)).map(drop),
            "all_gather #0 of F32 [3]",
        ),
    ),
    (
        (
            |g| g.all_reduce(zeros(3), ReduceOp::Sum).map(drop),
            "all_reduce(sum)",
        ),
        (
            |g| g.all_reduce(zeros(3), ReduceOp::Max).map(drop),
            "all_reduce(max)",
        ),
    ),
    (
        (|g| g.all_reduce(zeros(3), ReduceOp::Sum).map(drop), "[3]"),
        (
            |g| g.all_reduce(zeros(40_000), ReduceOp::Sum).map(drop),
            "[40000]",
        ),
    ),
    (
        (
            |g| g.reduce_scatter(zeros(6), ReduceOp::Sum).map(drop),
            "F32 [6]",
        ),
        (
            |g| {
                g.reduce_scatter(TensorData::from([0i64; 6]), ReduceOp::Sum)
                    .map(drop)
            },
            "I64 [6]",
        ),
    ),
    (
        (
            |g| g.broadcast(zeros(2), 0).map(drop),
            "broadcast(from member 0)",
        ),
        (
            |g| g.broadcast(zeros(2), 1).map(drop),
            "broadcast(from member 1)",
        ),
    ),
    (
        (
            |g| g.barrier().and_then(|()| g.all_gather(zeros(1)).map(drop)),
            "barrier #0",
        ),
        (|g| g.all_gather(zeros(1)).map(drop), "all_gather #0"),
    ),
    (
        (|g| twice(&anew(g)?), "barrier #1"),
        (
            |g| anew(g)?.barrier().and_then(|()| anew(g)?.barrier()),
            "barrier #0",
        ),
    ),
    (
        (
            |g| g.all_to_all(vec![zeros(1), zeros(2)]).map(drop),
            "all_to_all #0",
        ),
        (|g| g.barrier(), "barrier #0"),
    ),
];

/// A new group of the same members, whose calls are counted from 0.
fn anew(group: &Group) -> Result<Group, CollectiveError> {
    group.subgroup("again", group.members())
}

fn twice(group: &Group) -> Result<(), CollectiveError> {
    group.barrier()?;
    group.barrier()
}

#[rstest]
fn ranks_that_disagree_are_both_told_both_calls(#[values(Over::Threads, Over::Tcp)] over: Over) {
    for ((mine, mine_named), (theirs, theirs_named)) in DISAGREEMENTS {
        let begin = Instant::now();
        let ends = bounded(LIMIT, move || {
            world(over, 2, impatient(PATIENT), |group| {
                let operation = if group.rank() == 0 { mine } else { theirs };
                let error = operation(&group).unwrap_err();
                assert!(group.barrier().is_err(), "the group is unusable");
                Ok::<_, CollectiveError>(error)
            })
        });
        for end in ends {
            let text = end.unwrap().to_string();
            assert!(text.contains("ranks disagree"), "{text}");
            assert!(
                text.contains(mine_named) && text.contains(theirs_named),
                "{text}"
            );
        }
        assert!(begin.elapsed().as_secs_f64() < PATIENT / 2.0, "a timeout");
    }
}

#[rstest]
fn a_receiver_that_expects_another_tensor_says_so(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(DType::F32, DType::I32)] dtype: DType,
) {
    let ends = bounded(LIMIT, move || {
        world(over, 2, impatient(PATIENT), |group| match group.rank() {
            0 => group.send(zeros(3), 1).map(|()| None),
            _ => Ok::<_, CollectiveError>(group.recv(0, Some(&[4]), dtype).err()),
        })
    });
    let error = ends[1].as_ref().unwrap().clone().unwrap();
    let text = error.to_string();
    assert!(matches!(error, CollectiveError::Mismatch { .. }), "{text}");
    assert!(
        text.contains("F32 [3]") && text.contains(&format!("{dtype:?} [4]")),
        "{text}"
    );
}

#[rstest]
fn what_cannot_be_done_is_refused_and_told_to_all(#[values(Over::Threads, Over::Tcp)] over: Over) {
    const IMPOSSIBLE: [(Operation, &str); 6] = [
        (
            |g| {
                g.all_reduce(TensorData::from([1i32]), ReduceOp::Mean)
                    .map(drop)
            },
            "I32",
        ),
        (
            |g| g.reduce_scatter(zeros(3), ReduceOp::Sum).map(drop),
            "2 members",
        ),
        (
            |g| g.broadcast(zeros(3), 2).map(drop),
            "root 2 does not exist",
        ),
        (
            |g| g.all_to_all(vec![zeros(1)]).map(drop),
            "1 parts were given for 2 members",
        ),
        (|g| g.send(zeros(1), g.rank()), "not a peer"),
        (|g| g.recv(7, None, DType::F32).map(drop), "not a peer"),
    ];
    for (operation, named) in IMPOSSIBLE {
        let ends = bounded(LIMIT, move || {
            world(over, 2, impatient(PATIENT), |group| {
                Ok::<_, CollectiveError>(operation(&group).unwrap_err().to_string())
            })
        });
        for end in ends {
            let text = end.unwrap();
            assert!(text.contains(named), "{text}");
        }
    }
}

//! Ranks that disagree, stay away or fail while other ranks wait for them on the GPU: each of the
//! others gets an error that names the culprit, in time.

use std::{
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Tensor};
use megaburn::collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, Lane, RankEnv, ReduceOp, connect,
    free_port,
    tensors::{self, Work},
};

use crate::{
    GroupTest,
    collectives::{Outcome, text},
    ranks::this_gpu,
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[
    ("another_shape_is_named_with_both", another_shape),
    (
        "another_order_of_known_calls_is_named_with_both",
        another_order,
    ),
    (
        "a_rank_that_stays_away_is_named_when_the_time_is_over",
        stays_away,
    ),
    ("a_rank_that_fails_ends_the_others_at_once", fails),
    ("a_rank_that_leaves_ends_the_others", leaves),
    ("a_call_that_cannot_be_made_ends_the_others", unmade),
];

/// The timeout of collectives in these tests.
const TIMEOUT: Duration = Duration::from_secs(8);
/// The rank that behaves differently.
const CULPRIT: usize = 1;

/// Connects the ranks of `world` to another world, for one failure.
fn another_world(world: &Group) -> Result<Group, String> {
    let env = RankEnv::from_env()
        .map_err(text)?
        .ok_or("a rank has a launcher")?;
    let port = if world.rank() == 0 {
        free_port().map_err(|error| error.to_string())?
    } else {
        0
    };
    let port = world.broadcast([i32::from(port)].into(), 0).map_err(text)?;
    let port = port
        .try_to_vec::<i32>()
        .map_err(|error| error.to_string())?[0];
    let master_port = u16::try_from(port).map_err(|error| error.to_string())?;
    let group = GroupOptions {
        timeout: TIMEOUT,
        ..Default::default()
    };
    let options = ConnectOptions::new(RankEnv { master_port, ..env }).with_group(group);
    connect(&options).map_err(text)
}

fn ones(shape: [usize; 2]) -> Tensor<2> {
    Tensor::ones(shape, &this_gpu())
}

fn sum(world: &Group, shape: [usize; 2]) -> Result<Tensor<2>, CollectiveError> {
    tensors::all_reduce(ones(shape), ReduceOp::Sum, world, Lane::InOrder).map(Work::wait)
}

/// All-reduces and reads, as a training loop does, until there is an error.
fn until_it_fails(world: &Group, shape: [usize; 2]) -> CollectiveError {
    loop {
        if let Err(error) = sum(world, shape).map(|sum| drop(sum.try_into_data())) {
            return error;
        }
        if let Some(error) = world.failure() {
            return error;
        }
    }
}

/// Runs `culprit` on one rank and `other` on the rest, which must end with an error. The error of
/// every other rank must contain all of `named`, and must come within `limit`.
fn expect(
    world: &Group,
    limit: Duration,
    named: &[&str],
    culprit: fn(Group),
    other: fn(&Group) -> CollectiveError,
) -> Outcome {
    let broken = another_world(world)?;
    // Beforehand, load libraries, compile kernels and create the communicator.
    sum(&broken, [5, 33]).map_err(text)?.into_data();
    world.barrier().map_err(text)?;
    if world.rank() == CULPRIT {
        culprit(broken);
        // The other ranks are done with the broken world.
        return world.barrier().map_err(text);
    }
    let begin = Instant::now();
    let error = other(&broken).to_string();
    let took = begin.elapsed();
    drop(broken);
    world.barrier().map_err(text)?;
    if let Some(missing) = named.iter().find(|name| !error.contains(**name)) {
        return Err(format!("the error does not say `{missing}`: {error}"));
    }
    if took > limit {
        return Err(format!("it took {took:?}, more than {limit:?}: {error}"));
    }
    println!("after {took:.1?}: {error}");
    Ok(())
}

fn another_shape(world: &Group) -> Outcome {
    let named = ["ranks disagree", "F32 [4, 7]", "F32 [4, 8]"];
    let culprit = |world: Group| _ = until_it_fails(&world, [4, 8]);
    expect(world, TIMEOUT / 2, &named, culprit, |world| {
        until_it_fails(world, [4, 7])
    })
}

/// Both shapes were compared before, so NCCL hangs or returns garbage, and the members must notice.
fn another_order(world: &Group) -> Outcome {
    fn calls(world: &Group, first: [usize; 2], then: [usize; 2]) -> CollectiveError {
        let both = |a, b| {
            sum(world, a)?;
            sum(world, b).map(|sum| drop(sum.try_into_data()))
        };
        for _ in 0..3 {
            if let Err(error) = both([100, 33], [200, 33]) {
                return error;
            }
        }
        loop {
            if let Err(error) = both(first, then) {
                return error;
            }
            if let Some(error) = world.failure() {
                return error;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    let culprit = |world: Group| _ = calls(&world, [200, 33], [100, 33]);
    let named = ["ranks disagree"];
    expect(world, TIMEOUT, &named, culprit, |world| {
        calls(world, [100, 33], [200, 33])
    })
}

fn stays_away(world: &Group) -> Outcome {
    let culprit = |world: Group| {
        while world.failure().is_none() {
            thread::sleep(Duration::from_millis(10));
        }
    };
    let limit = TIMEOUT + Duration::from_secs(5);
    let named = ["timed out after 8.0 s", "rank 1"];
    expect(world, limit, &named, culprit, |world| {
        until_it_fails(world, [5, 33])
    })
}

fn fails(world: &Group) -> Outcome {
    let culprit = |world: Group| world.abort("its disk is full");
    let named = ["rank 1", "its disk is full"];
    let limit = Duration::from_secs(2);
    expect(world, limit, &named, culprit, |world| {
        until_it_fails(world, [5, 33])
    })
}

fn leaves(world: &Group) -> Outcome {
    let limit = TIMEOUT + Duration::from_secs(2);
    expect(world, limit, &["rank 1"], drop, |world| {
        until_it_fails(world, [5, 33])
    })
}

/// NCCL does not support the culprit's element type.
fn unmade(world: &Group) -> Outcome {
    let culprit = |world: Group| {
        let x = Tensor::<1, burn::tensor::Int>::zeros([3], (&this_gpu(), DType::I16));
        let error = tensors::all_reduce(x, ReduceOp::Sum, &world, Lane::InOrder).unwrap_err();
        println!("{error}");
    };
    let limit = TIMEOUT / 2;
    expect(world, limit, &["rank 1"], culprit, |world| {
        until_it_fails(world, [5, 33])
    })
}

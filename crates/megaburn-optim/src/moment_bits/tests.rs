//! Runs whose masters are stored as remainders, and whose moments in 8 bits.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{Device, FloatDType, TensorData};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_kernels::FP8_MOMENT_BLOCK;
use rstest::rstest;

use crate::{
    error::OptimError,
    moment::Moment,
    offload::{HostSlot, What},
    optimizer::Optimizer,
    rule::{AdamWConfig, LionConfig, MuonConfig, SgdConfig},
    sharding::{Sharding, ShardingConfig, ShardingLevel},
    state_dtype::StateDtype,
    testing::layers::{RULES, Training, optimizer, start},
};

/// The factors of the gradients of each step; the second one is skipped.
const FACTORS: [f32; 5] = [0.5, f32::NAN, 1.0, 0.25, 2.0];

/// State by moment (`None` for masters) and path: the range that a rank holds, and its bits.
type Held = BTreeMap<(Option<Moment>, String), (std::ops::Range<usize>, Vec<u32>)>;

fn held(training: &Training) -> Held {
    let held = training.held();
    let masters = held.masters.into_iter();
    let masters = masters.map(|(path, state)| ((None, path), state));
    let moments = held.moments.into_iter();
    let moments = moments.map(|((moment, path), state)| ((Some(moment), path), state));
    let read = |(key, state): (_, crate::held_state::StateTensor)| {
        let range = state.range.clone();
        // The second half is read from a copy.
        let mid = range.start + range.len() / 2;
        let mut data = vec![state.clone().read(range.start..mid).unwrap()];
        if mid < range.end {
            let (copy, _) = state.copy_to_host(mid..range.end).unwrap();
            data.push(copy.read().unwrap());
        }
        let values = data
            .into_iter()
            .flat_map(|data| data.try_to_vec::<f32>().unwrap());
        (key, (range, values.map(f32::to_bits).collect()))
    };
    masters.chain(moments).map(read).collect()
}

/// Bytes of stored masters and of stored moments.
fn bytes(optimizer: &Optimizer) -> [usize; 2] {
    let all = optimizer.state.iter();
    all.fold([0, 0], |[masters, moments], (key, slot)| {
        let tensor = slot.tensor();
        let bytes = tensor.dims()[0] * tensor.dtype().size();
        match key.what {
            What::Master => [masters + bytes, moments],
            What::Moment(_) => [masters, moments + bytes],
        }
    })
}

/// The bits of the parameters, and the state, after each step on two ranks.
fn on_two_ranks(
    level: usize,
    make: impl Fn(&Sharding) -> Optimizer + Sync,
    start: &[TensorData],
) -> Vec<Vec<(Vec<u32>, Held)>> {
    let level = [
        ShardingLevel::None,
        ShardingLevel::Optimizer,
        ShardingLevel::Gradients,
        ShardingLevel::Parameters,
    ][level];
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, "dp2".parse().expect("a layout"))?;
        let like = crate::testing::layers::Layers::new(start, &Device::default().autodiff());
        let config = ShardingConfig::new(level).with_bucket(Some(600));
        let sharding = config.init(&like, &groups)?;
        let mut training = Training::new(start, &sharding, make(&sharding), FloatDType::BF16);
        let step = |(number, factor): (usize, &f32)| {
            training.step(number, *factor);
            (training.net.bits(), held(&training))
        };
        Ok::<_, OptimError>(FACTORS.iter().enumerate().map(step).collect())
    });
    ranks.into_iter().map(|rank| rank.unwrap()).collect()
}

#[rstest]
fn remainders_are_the_masters_to_the_bit(
    #[values("adamw", "sgd", "lion", "muon")] rule: &str,
    #[values(0, 1, 3)] level: usize,
) {
    let start = start();
    let expected = on_two_ranks(level, |sharding| optimizer(rule, sharding, 0.0), &start);
    for fraction in [0.0, 0.5] {
        let make =
            |sharding: &Sharding| optimizer(rule, sharding, fraction).with_param_remainders(true);
        let found = on_two_ranks(level, make, &start);
        for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_same(
                found,
                expected,
                &format!("fraction {fraction}, rank {rank}"),
            );
        }
    }
}

/// Checks that parameters and state are the same after each step, except for masters that 16 bits
/// cannot hold: those between two bf16 numbers, from the step on that reached them.
fn assert_same(found: &[(Vec<u32>, Held)], expected: &[(Vec<u32>, Held)], what: &str) {
    let mut inexact = BTreeSet::new();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let place = format!("{what}, step {step}");
        assert_eq!(found.0, expected.0, "{place}: parameters");
        assert_eq!(found.1.len(), expected.1.len(), "{place}");
        for (key, (range, values)) in &expected.1 {
            let (found_range, found) = &found.1[key];
            assert_eq!(found_range, range, "{place}: {key:?}");
            for (at, (found, expected)) in found.iter().zip(values).enumerate() {
                if key.0.is_none() && expected & 0xffff == 0x8000 {
                    inexact.insert((key, at));
                }
                let most = if inexact.contains(&(key, at)) { 4 } else { 0 };
                let differs = found.abs_diff(*expected);
                assert!(differs <= most, "{place}: {key:?} {at} by {differs}");
            }
        }
    }
}

#[test]
fn a_master_takes_two_bytes() {
    let start = start();
    let sharding = Sharding::none();
    for (has_remainders, dtype, expected) in [
        (false, FloatDType::BF16, 4),
        (true, FloatDType::BF16, 2),
        // Only bf16 is the upper half of f32.
        (true, FloatDType::F16, 4),
        (true, FloatDType::F32, 0),
    ] {
        let optimizer = optimizer("adamw", &sharding, 0.0).with_param_remainders(has_remainders);
        let mut training = Training::new(&start, &sharding, optimizer, dtype);
        for number in 0..2 {
            assert_eq!(bytes(&training.optimizer)[0], expected * 90);
            training.step(number, 1.0);
        }
    }
}

#[test]
fn a_parameter_without_a_master_yet_begins_one() {
    let start = start();
    let run = |has_remainders| {
        let sharding = Sharding::none();
        let made = optimizer("adamw", &sharding, 0.0).with_param_remainders(has_remainders);
        let mut training = Training::new(&start, &sharding, made, FloatDType::BF16);
        training.optimizer =
            optimizer("adamw", &sharding, 0.0).with_param_remainders(has_remainders);
        let step = |number| {
            training.step(number, 1.0);
            (training.net.bits(), held(&training))
        };
        (0..3).map(step).collect::<Vec<_>>()
    };
    assert_same(&run(true), &run(false), "begun");
}

/// An optimizer whose moments are stored in this type.
fn of_moments(rule: &str, dtype: StateDtype, sharding: &Sharding) -> Optimizer {
    let adamw = AdamWConfig::new()
        .with_exp_avg(dtype)
        .with_exp_avg_sq(dtype);
    let optimizer = match rule {
        "adamw" => adamw.init(sharding),
        "sgd" => SgdConfig {
            momentum_buffer: dtype,
            ..SgdConfig::default()
        }
        .init(sharding),
        "lion" => LionConfig {
            exp_avg: dtype,
            ..LionConfig::default()
        }
        .init(sharding),
        _ => MuonConfig {
            momentum_buffer: dtype,
            adamw,
            ..MuonConfig::default()
        }
        .init(sharding, &ProcessGroups::single(0)),
    };
    optimizer.unwrap()
}

/// A rank holds the same numbers under every sharding, and a skipped step changes none.
#[rstest]
fn moments_in_8_bits_do_not_depend_on_the_sharding(
    #[values("adamw", "sgd", "lion", "muon")] rule: &str,
) {
    let start = start();
    let run = |level, fraction: f64| {
        let make = |sharding: &Sharding| {
            let optimizer = of_moments(rule, StateDtype::Fp8, sharding).with_param_remainders(true);
            optimizer.with_cpu_offload(fraction).unwrap()
        };
        on_two_ranks(level, make, &start)
    };
    let whole = run(0, 0.0);
    let of_rank = &whole[0];
    let moments = |held: &Held| -> Held {
        let all = held.iter().filter(|((moment, _), _)| moment.is_some());
        all.map(|(key, held)| (key.clone(), held.clone())).collect()
    };
    assert!(moments(&of_rank[0].1) == moments(&of_rank[1].1));
    assert!(moments(&of_rank[1].1) != moments(&of_rank[2].1));
    for (level, fraction) in [(1, 0.0), (2, 0.5), (3, 0.0)] {
        for (found, expected) in run(level, fraction).iter().zip(&whole) {
            for ((params, found), (all, expected)) in found.iter().zip(expected) {
                assert!(level == 3 || params == all);
                for (key, (range, bits)) in found {
                    assert!(*bits == expected[key].1[range.clone()], "{level} {key:?}");
                }
            }
        }
    }
}

/// Rounded moments move the parameters about as f32 ones do.
#[rstest]
fn moments_in_8_bits_are_close(#[values("adamw", "sgd", "muon")] rule: &str) {
    let start = start();
    let sharding = Sharding::none();
    let run = |dtype| {
        let optimizer = of_moments(rule, dtype, &sharding);
        let mut training = Training::new(&start, &sharding, optimizer, FloatDType::F32);
        (0..8).for_each(|number| training.step(number, 1.0));
        let stored = (bytes(&training.optimizer)[1], training.held().moments.len());
        let bits = training.net.bits().into_iter();
        (stored, bits.map(f32::from_bits).collect::<Vec<_>>())
    };
    let [(stored, found), (_, expected)] = [StateDtype::Fp8, StateDtype::F32].map(run);
    // Each parameter is one block.
    let (stored, num_moments) = stored;
    assert_eq!(stored, num_moments * (FP8_MOMENT_BLOCK + 2));
    let first = Training::new(
        &start,
        &sharding,
        optimizer(rule, &sharding, 0.0),
        FloatDType::F32,
    );
    let first = first.net.bits().into_iter().map(f32::from_bits);
    let norm = |all: Vec<f32>| all.iter().map(|x| x * x).sum::<f32>().sqrt();
    let moved = norm(
        expected
            .iter()
            .zip(first)
            .map(|(x, first)| x - first)
            .collect(),
    );
    let off = norm(
        expected
            .iter()
            .zip(&found)
            .map(|(x, found)| x - found)
            .collect(),
    );
    assert!(0.0 < off && off < 0.1 * moved, "{off} of {moved}");
}

#[test]
fn what_was_saved_goes_on_bit_for_bit() {
    let start = start();
    let sharding = Sharding::none();
    for rule in RULES {
        let make = || {
            let optimizer =
                of_moments(rule, StateDtype::Fp8, &sharding).with_param_remainders(true);
            Training::new(&start, &sharding, optimizer, FloatDType::BF16)
        };
        let mut first = make();
        (0..3).for_each(|number| first.step(number, 1.0));
        let saved = held(&first);
        let data = |key: &(Option<Moment>, String), shape: Vec<usize>| {
            let values: Vec<f32> = saved[key]
                .1
                .iter()
                .map(|bits| f32::from_bits(*bits))
                .collect();
            Ok::<_, OptimError>(TensorData::new(values, shape))
        };
        let mut second = make();
        let read = |path: &str, shape: &[usize]| data(&(None, path.to_string()), shape.to_vec());
        let net = second.net.clone();
        second.net = second
            .optimizer
            .load_params(net, FloatDType::BF16, read)
            .unwrap();
        let read = |path: &str, moment, range: std::ops::Range<usize>| {
            data(&(Some(moment), path.to_string()), vec![range.len()])
        };
        second.optimizer.load_state(3, &second.grads, read).unwrap();
        assert!(held(&second) == saved, "{rule}");
        for number in 3..5 {
            first.step(number, 1.0);
            second.step(number, 1.0);
        }
        assert!(first.net.bits() == second.net.bits(), "{rule}");
        assert!(held(&first) == held(&second), "{rule}");
        let is_here = |slot: &HostSlot| matches!(slot, HostSlot::Here(_));
        assert!(second.optimizer.state.iter().all(|(_, slot)| is_here(slot)));
    }
}

use burn::tensor::{Device, FloatDType, TensorData};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use rstest::rstest;

use super::*;
use crate::{
    rule::AdamWConfig,
    sharding::{Sharding, ShardingConfig, ShardingLevel},
    testing::{
        full_state::{FullState, full_state},
        layers::{Layers, RULES, Training, optimizer, start},
    },
};

/// Masters and moments of unsharded parameters, in f32.
fn whole(optimizer: &Optimizer) -> FullState {
    full_state(optimizer).unwrap()
}

/// Bytes of state in host memory, and bytes of all state.
fn bytes(optimizer: &Optimizer) -> [usize; 2] {
    optimizer
        .state
        .iter()
        .fold([0, 0], |[away, all], (_, kept)| {
            let tensor = kept.tensor();
            let bytes = tensor.shape().num_elements() * tensor.dtype().size();
            match kept {
                HostSlot::OffloadedTensor(host) => {
                    assert_eq!(host.bytes(), bytes);
                    [away + bytes, all + bytes]
                }
                HostSlot::Here(_) => [away, all + bytes],
            }
        })
}

#[rstest]
fn every_rule_and_level_takes_the_same_steps(
    #[values("adamw", "sgd", "lion", "muon")] rule: &str,
    #[values(0, 1, 2, 3)] level: usize,
    #[values(FloatDType::F32, FloatDType::BF16)] dtype: FloatDType,
) {
    let start = start();
    let level = [
        ShardingLevel::None,
        ShardingLevel::Optimizer,
        ShardingLevel::Gradients,
        ShardingLevel::Parameters,
    ][level];
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, "dp2".parse().expect("a layout"))?;
        let like = Layers::new(&start, &Device::default().autodiff());
        // Some buckets have several parameters, and ranks keep a part of a parameter or nothing of
        // it.
        let config = ShardingConfig::new(level).with_bucket(Some(600));
        let train = |fraction: f64| {
            let sharding = config.init(&like, &groups)?;
            let optimizer = optimizer(rule, &sharding, fraction);
            let mut training = Training::new(&start, &sharding, optimizer, dtype);
            let mut seen = Vec::new();
            for (number, factor) in [0.5, f32::NAN, 1.0, f32::INFINITY, 0.25]
                .into_iter()
                .enumerate()
            {
                let before = whole(&training.optimizer);
                training.step(number, factor);
                let after = whole(&training.optimizer);
                // Before the first step there are no moments.
                assert!(
                    number == 0 || (before == after) != factor.is_finite(),
                    "{number}"
                );
                seen.push((training.net.bits(), after));
            }
            assert_eq!(
                training.optimizer.state.num_late_tensors, 0,
                "{rule} at {fraction}"
            );
            Ok::<_, OptimError>((seen, bytes(&training.optimizer)))
        };
        let (expected, [away, all]) = train(0.0)?;
        assert!(away == 0 && all > 0);
        for fraction in [0.3, 1.0] {
            let (found, [away, all]) = train(fraction)?;
            assert!(found == expected, "{rule} at {fraction}");
            assert!(
                away <= all && (fraction < 1.0 || away == all),
                "{away} of {all}"
            );
        }
        Ok::<_, OptimError>(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
}

#[test]
fn the_fraction_is_in_host_memory_before_the_first_step_and_behind_it() {
    let start = start();
    for (fraction, dtype) in [0.0, 0.3, 0.5, 1.0]
        .into_iter()
        .flat_map(|f| [(f, FloatDType::F32), (f, FloatDType::BF16)])
    {
        let optimizer = optimizer("adamw", &Sharding::none(), fraction);
        let mut training = Training::new(&start, &Sharding::none(), optimizer, dtype);
        // The largest parameter has 32 of 90 elements.
        let about = |[away, all]: [usize; 2]| {
            let found = away as f64 / all.max(1) as f64;
            assert!(
                all == 0 || (found - fraction).abs() <= 16.0 / 90.0,
                "{found}, not {fraction}"
            );
            assert!(fraction != 1.0 || away == all);
            all
        };
        assert_eq!(
            about(bytes(&training.optimizer)) > 0,
            dtype == FloatDType::BF16
        );
        let masters = |optimizer: &Optimizer| -> Vec<bool> {
            let masters = optimizer
                .state
                .iter()
                .filter(|(key, _)| key.what == What::Master);
            masters
                .map(|(_, kept)| matches!(kept, HostSlot::OffloadedTensor(_)))
                .collect()
        };
        let before = masters(&training.optimizer);
        for number in 0..2 {
            training.step(number, 1.0);
            about(bytes(&training.optimizer));
            assert_eq!(
                masters(&training.optimizer),
                before,
                "they stay where they are"
            );
        }
    }
}

#[test]
fn saved_state_goes_on_with_any_fraction() {
    let start = start();
    for (rule, fraction, other) in RULES
        .into_iter()
        .flat_map(|r| [(r, 0.0, 1.0), (r, 1.0, 0.4), (r, 0.4, 0.0)])
    {
        let sharding = Sharding::none();
        let make = |fraction| {
            let optimizer = optimizer(rule, &sharding, fraction);
            Training::new(&start, &sharding, optimizer, FloatDType::BF16)
        };
        let mut first = make(fraction);
        (0..3).for_each(|number| first.step(number, 1.0));
        let saved = whole(&first.optimizer);

        let mut second = make(other);
        let read = |path: &str, shape: &[usize]| {
            let values = saved[&(None, path.to_string())].clone();
            Ok::<_, OptimError>(TensorData::new(values, shape.to_vec()))
        };
        second.net = second
            .optimizer
            .load_params(second.net, FloatDType::BF16, read)
            .unwrap();
        let read = |path: &str, moment, _: std::ops::Range<usize>| {
            let values = saved[&(Some(moment), path.to_string())].clone();
            let len = values.len();
            Ok::<_, OptimError>(TensorData::new(values, [len]))
        };
        let time = first.optimizer.time();
        let grads = &second.grads;
        second.optimizer.load_state(time, grads, read).unwrap();
        assert!(
            whole(&second.optimizer) == saved,
            "{rule} from {fraction} to {other}"
        );
        for number in 3..5 {
            first.step(number, 1.0);
            second.step(number, 1.0);
        }
        assert!(
            first.net.bits() == second.net.bits(),
            "{rule} from {fraction} to {other}"
        );
        assert!(whole(&first.optimizer) == whole(&second.optimizer));
    }
}

#[test]
fn a_clone_has_state_of_its_own() {
    let start = start();
    for rule in RULES {
        let optimizer = optimizer(rule, &Sharding::none(), 1.0);
        let mut training = Training::new(&start, &Sharding::none(), optimizer, FloatDType::BF16);
        training.step(0, 1.0);
        let net = training.net.clone();
        let before = training.optimizer.clone();
        let saved = whole(&before);
        training.step(1, 1.0);
        let after = (training.net.bits(), whole(&training.optimizer));
        assert!(whole(&before) == saved && after.1 != saved);
        training.net = net;
        training.optimizer = before;
        training.step(1, 1.0);
        assert!(
            (training.net.bits(), whole(&training.optimizer)) == after,
            "{rule}"
        );
    }
}

#[rstest]
#[case(-0.1, "cpu_offload_fraction is -0.1; it must be at least 0 and at most 1")]
#[case(1.1, "cpu_offload_fraction is 1.1;")]
#[case(f64::NAN, "cpu_offload_fraction is NaN;")]
fn another_fraction_is_refused(#[case] fraction: f64, #[case] message: &str) {
    let optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
    let error = optimizer
        .with_cpu_offload(fraction)
        .unwrap_err()
        .to_string();
    assert!(error.contains(message), "{error}");
}

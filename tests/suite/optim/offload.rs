//! Optimizer state in host memory changes no number.

use megaburn::train::{
    TrainConfig,
    config::{Dtype, OptimizerName},
};
use rstest::rstest;

use crate::{
    optim::zero::{assert_resumes, in_order, losses},
    precision::bf16::{bits, config, saved, train},
};
use megaburn_test_support::run::Run;

/// The configuration of a run with optimizer `name` that keeps a `fraction` of its state in host
/// memory.
fn by(
    run: &Run,
    (name, dtype): (OptimizerName, Dtype),
    (layout, zero): (&str, u8),
    fraction: f64,
) -> TrainConfig {
    let mut config = config(run, layout, dtype);
    config.parallel.zero = zero;
    config.parallel.bucket_size = Some(5000);
    config.optimizer.name = name;
    config.optimizer.cpu_offload_fraction = fraction;
    config
}

/// Every pair of values of two columns occurs.
#[rstest]
#[case(OptimizerName::AdamW, ("tp1", 0), Dtype::F32)]
#[case(OptimizerName::AdamW, ("tp2-dp2-sp", 1), Dtype::Bf16)]
#[case(OptimizerName::AdamW, ("dp2", 2), Dtype::F32)]
#[case(OptimizerName::AdamW, ("dp4", 3), Dtype::Bf16)]
#[case(OptimizerName::Sgd, ("tp1", 0), Dtype::Bf16)]
#[case(OptimizerName::Sgd, ("tp2-dp2-sp", 1), Dtype::F32)]
#[case(OptimizerName::Sgd, ("dp2", 2), Dtype::Bf16)]
#[case(OptimizerName::Sgd, ("dp4", 3), Dtype::F32)]
#[case(OptimizerName::Lion, ("tp1", 0), Dtype::F32)]
#[case(OptimizerName::Lion, ("tp2-dp2-sp", 1), Dtype::Bf16)]
#[case(OptimizerName::Lion, ("dp2", 2), Dtype::F32)]
#[case(OptimizerName::Lion, ("dp4", 3), Dtype::Bf16)]
#[case(OptimizerName::Muon, ("tp1", 0), Dtype::Bf16)]
#[case(OptimizerName::Muon, ("tp2-dp2-sp", 1), Dtype::F32)]
#[case(OptimizerName::Muon, ("dp2", 2), Dtype::Bf16)]
#[case(OptimizerName::Muon, ("dp4", 3), Dtype::F32)]
fn ten_steps_are_the_same_to_the_bit(
    #[case] name: OptimizerName,
    #[case] way: (&str, u8),
    #[case] dtype: Dtype,
) {
    assert_ten_steps_are_the_same(name, way, dtype);
}

#[rstest]
#[ignore = "it takes minutes"]
fn ten_steps_of_the_whole_product_are_the_same_to_the_bit(
    #[values(
        OptimizerName::AdamW,
        OptimizerName::Sgd,
        OptimizerName::Lion,
        OptimizerName::Muon
    )]
    name: OptimizerName,
    #[values(("tp1", 0), ("tp2-dp2-sp", 1), ("dp2", 2), ("dp4", 3))] way: (&str, u8),
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    assert_ten_steps_are_the_same(name, way, dtype);
}

fn assert_ten_steps_are_the_same(name: OptimizerName, way: (&str, u8), dtype: Dtype) {
    let run = |fraction| {
        let run = Run::new();
        let mut config = by(&run, (name, dtype), way, fraction);
        config.optimizer.clip_grad = 0.5;
        let steps = train(config, 10);
        (losses(&steps), saved(&run))
    };
    let expected = run(0.0);
    for fraction in [0.3, 1.0] {
        let found = run(fraction);
        assert_eq!(found.0, expected.0, "{fraction}");
        assert!(bits(&found.1) == bits(&expected.1), "{fraction}");
    }
}

/// The initial loss scale is so large that the first steps are skipped.
#[rstest]
fn a_skipped_step_changes_none_of_it(
    #[values(("tp1", 0), ("dp2", 1), ("dp2", 3))] way: (&str, u8),
) {
    let run = |fraction| {
        let run = Run::new();
        let steps = train(
            in_order(by(&run, (OptimizerName::AdamW, Dtype::F16), way, fraction)),
            10,
        );
        let skipped: Vec<bool> = steps.iter().map(|step| step.skipped).collect();
        assert!(
            skipped.contains(&true) && skipped.contains(&false),
            "{skipped:?}"
        );
        (losses(&steps), saved(&run))
    };
    let found = run(0.6);
    let expected = run(0.0);
    assert_eq!(found.0, expected.0);
    assert!(bits(&found.1) == bits(&expected.1));
}

#[rstest]
#[case(OptimizerName::AdamW, ("dp2", 1), ("tp1", 0))]
#[case(OptimizerName::Muon, ("tp1", 0), ("dp2", 2))]
#[case(OptimizerName::Sgd, ("dp2", 3), ("dp2", 3))]
fn it_resumes_bit_for_bit_with_another_fraction(
    #[case] name: OptimizerName,
    #[case] way: (&str, u8),
    #[case] other: (&str, u8),
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    // Consecutive runs use different fractions.
    let fractions = std::cell::Cell::new(0.0);
    let config = |run: &Run, layout: &str, zero| {
        fractions.set((fractions.get() + 0.4) % 1.0);
        by(run, (name, dtype), (layout, zero), fractions.get())
    };
    assert_resumes(config, way, other);
}

//! Every optimizer, sharded or not, under any layout.

use megaburn::{
    optim::MuonTpMode,
    train::{
        TrainConfig,
        config::{Dtype, OptimizerName},
    },
};
use rstest::rstest;

use crate::{
    optim::zero::{assert_resumes, in_order, losses},
    precision::bf16::{bits, config, relative, saved, train},
};
use megaburn_test_support::{gather::relative_distance, run::Run};

/// The configuration of a run with optimizer `name`, with several buckets and several parameters
/// per bucket.
fn by(run: &Run, name: OptimizerName, layout: &str, zero: u8) -> TrainConfig {
    let mut config = config(run, layout, Dtype::F32);
    config.parallel.zero = zero;
    config.parallel.bucket_size = Some(5000);
    config.optimizer.name = name;
    config.optimizer.lr = match name {
        OptimizerName::Sgd => 0.3,
        OptimizerName::Lion => 5e-3,
        OptimizerName::AdamW | OptimizerName::Muon => 1e-2,
    };
    config
}

/// Every pair of values of two columns occurs.
#[rstest]
#[case(OptimizerName::Sgd, "dp2", 1, Dtype::F32)]
#[case(OptimizerName::Sgd, "dp4", 2, Dtype::F32)]
#[case(OptimizerName::Sgd, "tp2-dp2-sp", 3, Dtype::Bf16)]
#[case(OptimizerName::Lion, "dp2", 2, Dtype::Bf16)]
#[case(OptimizerName::Lion, "dp4", 3, Dtype::F32)]
#[case(OptimizerName::Lion, "tp2-dp2-sp", 1, Dtype::F32)]
#[case(OptimizerName::Muon, "dp2", 3, Dtype::F32)]
#[case(OptimizerName::Muon, "dp4", 1, Dtype::Bf16)]
#[case(OptimizerName::Muon, "tp2-dp2-sp", 2, Dtype::F32)]
fn ten_steps_shared_out_are_the_same_to_the_bit(
    #[case] name: OptimizerName,
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] dtype: Dtype,
) {
    assert_ten_steps_are_the_same(name, layout, zero, dtype);
}

#[rstest]
#[ignore = "it takes minutes"]
fn ten_steps_of_the_whole_product_are_the_same_to_the_bit(
    #[values(OptimizerName::Sgd, OptimizerName::Lion, OptimizerName::Muon)] name: OptimizerName,
    #[values("dp2", "dp4", "tp2-dp2-sp")] layout: &str,
    #[values(1, 2, 3)] zero: u8,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    assert_ten_steps_are_the_same(name, layout, zero, dtype);
}

fn assert_ten_steps_are_the_same(name: OptimizerName, layout: &str, zero: u8, dtype: Dtype) {
    let [found, expected] = [0; 2].map(|_| Run::new());
    let run = |run: &Run, zero| {
        let mut config = in_order(by(run, name, layout, zero));
        config.train.dtype = dtype;
        train(config, 10)
    };
    let steps = run(&found, zero);
    let without = run(&expected, 0);
    assert_eq!(losses(&steps), losses(&without));
    assert_eq!(bits(&saved(&found)), bits(&saved(&expected)));
    assert!(
        steps[9].loss < steps[0].loss,
        "{name} does not learn: {steps:?}"
    );
}

/// Rounding must have little effect on a step, but the signs in Lion's update flip with the last
/// bit.
#[rstest]
fn ten_steps_under_another_layout_are_the_same(
    #[values(OptimizerName::Sgd, OptimizerName::Muon)] name: OptimizerName,
    #[values("dp2", "tp2", "tp4-sp", "tp2-dp4")] layout: &str,
) {
    let [found, expected] = [0; 2].map(|_| Run::new());
    let run = |run: &Run, layout, zero| {
        let mut config = by(run, name, layout, zero);
        config.optimizer.lr /= 10.0;
        // Keeps gradients that are little more than rounding from becoming full updates.
        config.optimizer.clip_grad = 0.5;
        config.optimizer.eps = 1e-5;
        train(config, 10)
    };
    let steps = run(&found, layout, 1);
    let alone = run(&expected, "tp1", 0);
    for (found, expected) in steps.iter().zip(&alone) {
        assert!(
            relative(found.loss, expected.loss) < 1e-5,
            "{found:?} {expected:?}"
        );
    }
    let expected = saved(&expected);
    for (name, found) in saved(&found)
        .iter()
        .filter(|(name, _)| name.starts_with("model."))
    {
        let distance = relative_distance(found, &expected[name]);
        assert!(distance < 1e-4, "{name} differs by {distance:e}");
    }
}

#[rstest]
fn ranks_that_work_on_a_matrix_together_are_one(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let [found, expected] = [0; 2].map(|_| Run::new());
    let run = |run: &Run, layout, mode| {
        let mut config = by(run, OptimizerName::Muon, layout, 1);
        config.train.dtype = dtype;
        config.optimizer.muon.tp_mode = mode;
        config.optimizer.lr /= 10.0;
        train(config, 4)
    };
    let together = run(&found, "tp2-dp2-sp", MuonTpMode::Distributed);
    let alone = run(&expected, "tp1", MuonTpMode::Blockwise);
    let tolerance = if dtype == Dtype::F32 { 1e-5 } else { 1e-2 };
    for (found, expected) in together.iter().zip(&alone) {
        assert!(
            relative(found.loss, expected.loss) < tolerance,
            "{found:?} {expected:?}"
        );
    }
}

#[rstest]
#[case(OptimizerName::Sgd, "dp2", 1, "tp2-dp2", 0)]
#[case(OptimizerName::Lion, "tp2-dp2-sp", 2, "dp4", 1)]
#[case(OptimizerName::Muon, "dp4", 1, "tp2-dp2-sp", 2)]
#[case(OptimizerName::Muon, "tp2-dp2-sp", 2, "tp1", 0)]
fn it_resumes_bit_for_bit_and_under_any_layout_and_stage(
    #[case] name: OptimizerName,
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] other_layout: &str,
    #[case] other: u8,
) {
    let config = |run: &Run, layout: &str, zero| by(run, name, layout, zero);
    assert_resumes(config, (layout, zero), (other_layout, other));
}

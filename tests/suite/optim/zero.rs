//! ZeRO's sharding over data-parallel ranks changes nothing but memory.

use megaburn::{
    report::metrics::{MetricsRecord, StepMetrics, read_metrics},
    train::{TrainConfig, config::Dtype},
};
use rstest::rstest;

use crate::{
    precision::bf16::{bits, config, relative, saved, train},
    runs::child::Ranks,
};
use megaburn_test_support::{gather::relative_distance, run::Run};

/// The configuration of a sharded run, with several buckets and several parameters per bucket.
fn shared(run: &Run, layout: &str, dtype: Dtype, zero: u8) -> TrainConfig {
    let mut config = config(run, layout, dtype);
    config.parallel.zero = zero;
    config.parallel.bucket_size = Some(5000);
    config
}

/// The initial loss scale: f16 holds the gradients except in the first steps.
const LOSS_SCALE: f64 = 65536.0 * 16.0;

/// Makes all sums run in the same order: one micro-batch per rank, and no gradient norm, which
/// would be summed over shards.
pub(crate) fn in_order(mut config: TrainConfig) -> TrainConfig {
    let dp = config.layout(None).unwrap().dp;
    config.train.micro_batch = config.train.global_batch / dp;
    config.optimizer.clip_grad = 0.0;
    config.optimizer.initial_loss_scale = LOSS_SCALE;
    config
}

pub(crate) fn losses(steps: &[StepMetrics]) -> Vec<u64> {
    steps.iter().map(|step| step.loss.to_bits()).collect()
}

/// Every pair of values of two columns occurs.
#[rstest]
#[case("dp2", 1, Dtype::F32)]
#[case("dp2", 2, Dtype::Bf16)]
#[case("dp2", 3, Dtype::F16)]
#[case("dp8", 1, Dtype::Bf16)]
#[case("dp8", 2, Dtype::F16)]
#[case("dp8", 3, Dtype::F32)]
#[case("tp2-dp2-sp", 1, Dtype::F16)]
#[case("tp2-dp2-sp", 2, Dtype::F32)]
#[case("tp2-dp2-sp", 3, Dtype::Bf16)]
#[case("tp2-dp4", 1, Dtype::F32)]
#[case("tp2-dp4", 2, Dtype::Bf16)]
#[case("tp2-dp4", 3, Dtype::F16)]
fn ten_steps_are_the_same_to_the_bit(#[case] layout: &str, #[case] zero: u8, #[case] dtype: Dtype) {
    assert_ten_steps_are_the_same(layout, zero, dtype);
}

#[rstest]
#[ignore = "it takes minutes"]
fn ten_steps_of_the_whole_product_are_the_same_to_the_bit(
    #[values("dp2", "dp8", "tp2-dp2-sp", "tp2-dp4")] layout: &str,
    #[values(1, 2, 3)] zero: u8,
    #[values(Dtype::F32, Dtype::Bf16, Dtype::F16)] dtype: Dtype,
) {
    assert_ten_steps_are_the_same(layout, zero, dtype);
}

fn assert_ten_steps_are_the_same(layout: &str, zero: u8, dtype: Dtype) {
    let [found, expected] = [0; 2].map(|_| Run::new());
    let steps = train(in_order(shared(&found, layout, dtype, zero)), 10);
    let mut without = in_order(config(&expected, layout, dtype));
    without.parallel.overlap = false;
    let without = train(without, 10);
    assert_eq!(losses(&steps), losses(&without));
    assert_eq!(bits(&saved(&found)), bits(&saved(&expected)));
    assert!(steps[9].loss < steps[0].loss, "it does not learn");
    assert!(
        steps.iter().filter(|step| step.skipped).count() < 8,
        "{steps:?}"
    );
}

/// The stages of a layout, each with `parallel.zero_ranks`, are compared with one run without ZeRO.
#[rstest]
#[case("dp2", &[(1, None), (2, None)])]
#[case("dp4", &[(2, Some(2)), (3, None)])]
#[case("dp8", &[(1, Some(4))])]
#[case("tp2-dp4-sp", &[(3, Some(2)), (1, Some(2))])]
#[case("tp2-dp2-sp", &[(2, None)])]
fn ten_clipped_steps_of_many_micro_batches_are_the_same(
    #[case] layout: &str,
    #[case] stages: &[(u8, Option<usize>)],
) {
    let clipped = |mut config: TrainConfig| {
        config.optimizer.clip_grad = 0.5;
        // Keeps gradients that are little more than rounding from becoming full updates, and makes
        // steps so short that the gradients after ten of them do not magnify it.
        config.optimizer.eps = 1e-5;
        config.optimizer.lr = 1e-3;
        train(config, 10)
    };
    let without = Run::new();
    let steps_without = clipped(config(&without, layout, Dtype::F32));
    assert!(
        steps_without.iter().any(|step| step.grad_norm > 0.5),
        "nothing was clipped"
    );
    let without = saved(&without);
    for &(zero, ranks) in stages {
        let run = Run::new();
        let mut config = shared(&run, layout, Dtype::F32, zero);
        config.parallel.zero_ranks = ranks;
        for (found, expected) in clipped(config).iter().zip(&steps_without) {
            assert!(
                relative(found.loss, expected.loss) < 1e-6,
                "zero {zero}, {ranks:?}: {found:?} {expected:?}"
            );
            assert!(
                relative(found.grad_norm, expected.grad_norm) < 1e-6,
                "zero {zero}, {ranks:?}: {found:?} {expected:?}"
            );
        }
        for (name, found) in saved(&run)
            .iter()
            .filter(|(name, _)| name.starts_with("model."))
        {
            let distance = relative_distance(found, &without[name]);
            assert!(
                distance < 1e-6,
                "zero {zero}, {ranks:?}: {name} differs by {distance:e}"
            );
        }
    }
}

#[rstest]
#[case("dp2", 1, "dp4", 2)]
#[case("tp2-dp2-sp", 2, "tp1", 0)]
#[case("dp2", 0, "tp2-dp2", 1)]
#[case("dp4", 3, "tp2-dp2", 1)]
#[case("tp2-dp2-sp", 1, "dp2", 3)]
fn it_resumes_bit_for_bit_and_under_any_layout_and_stage(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] other_layout: &str,
    #[case] other: u8,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let config = |run: &Run, layout: &str, zero| shared(run, layout, dtype, zero);
    assert_resumes(config, (layout, zero), (other_layout, other));
}

/// Checks that a run is bit-identical to an uninterrupted one after it was interrupted, loaded and
/// saved with the settings of another run, and resumed.
pub(crate) fn assert_resumes(
    config: impl Fn(&Run, &str, u8) -> TrainConfig,
    (layout, zero): (&str, u8),
    (other_layout, other): (&str, u8),
) {
    let [whole, parts] = [0; 2].map(|_| Run::new());
    let straight = train(config(&whole, layout, zero), 4);
    train(config(&parts, layout, zero), 2);
    let half = saved(&parts);
    train(config(&parts, other_layout, other), 2);
    assert_eq!(bits(&saved(&parts)), bits(&half));
    let rest = train(config(&parts, layout, zero), 4);
    assert_eq!(losses(&rest), losses(&straight[2..]));
    assert_eq!(bits(&saved(&parts)), bits(&saved(&whole)));
}

/// Includes evaluations between steps, a sample at the end, and checkpoints.
#[test]
fn a_whole_run_is_the_same_at_every_stage() {
    let found = [0, 1, 2, 3].map(|zero| {
        let run = Run::new();
        let zero = format!("parallel.zero={zero}");
        let sets = [
            zero.as_str(),
            "parallel.bucket_size=5000",
            "train.micro_batch=2",
            "train.eval_interval=2",
            "train.eval_batches=3",
            "train.checkpoint_interval=3",
            "generate.tokens=8",
            "optimizer.clip_grad=0.0",
        ];
        let ended = Ranks::threads(&run.args("tp2-dp4", 5, &sets))
            .finish()
            .remove(0);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let sample = ended
            .stdout
            .split("\nsample ")
            .nth(1)
            .expect("a sample")
            .to_string();
        let sample = sample.split("\nfinished").next().map(str::to_string);
        let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
        let evals = records.into_iter().filter_map(|record| match record {
            MetricsRecord::Eval(eval) => Some((eval.step, eval.eval_loss.to_bits())),
            MetricsRecord::Step(_) => None,
        });
        (
            run.numbers().iter().map(|n| n[1]).collect::<Vec<_>>(),
            evals.collect::<Vec<_>>(),
            sample,
        )
    });
    assert!(found[0].1.len() >= 2, "{found:?}");
    assert!(found.iter().all(|run| *run == found[0]), "{found:?}");
}

#[test]
fn zeros_and_the_norm_of_parameters_are_the_same_under_every_layout_and_stage() {
    let steps = |layout, zero| {
        let run = Run::new();
        let mut config = shared(&run, layout, Dtype::F32, zero);
        config.train.log_num_zeros = true;
        config.train.log_params_norm = true;
        config.optimizer.eps = 1e-5;
        config.model.tied = false;
        train(config, 3)
    };
    let expected = steps("tp1", 0);
    // Embedding rows of tokens that no sample contains have zero gradients.
    assert!(
        expected
            .iter()
            .all(|step| step.num_zeros.is_some_and(|zeros| zeros > 32))
    );
    for (layout, zero) in [
        ("dp4", 0),
        ("dp4", 1),
        ("tp2-dp2-sp", 2),
        ("tp2-dp2", 3),
        ("tp4-sp", 0),
    ] {
        for (found, expected) in steps(layout, zero).iter().zip(&expected) {
            assert_eq!(found.num_zeros, expected.num_zeros, "{layout}, zero {zero}");
            let [found, expected] = [found, expected].map(|step| step.params_norm.unwrap());
            assert!(
                relative(found, expected) < 1e-6,
                "{layout}: {found} {expected}"
            );
        }
    }
}

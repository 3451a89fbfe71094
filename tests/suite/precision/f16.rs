//! Runs in f16 match f32 runs up to rounding. The loss scale keeps gradients from vanishing and
//! overflowing, and steps whose gradients overflow are skipped.
//!
//! An f16 number has 11 bits, so rounding changes it by at most 1/4096 of itself.

use megaburn::train::{TrainConfig, config::Dtype};
use rstest::rstest;

use crate::{
    precision::bf16::{
        assert_updates_close, bits, config, first_update, plain_descent, relative, saved, train,
    },
    runs::child::Ranks,
};
use megaburn_test_support::{
    gather::{FullParams, relative_distance},
    run::Run,
};

/// Plain descent with a loss scale at which nothing overflows.
fn descent(run: &Run, layout: &str, dtype: Dtype) -> TrainConfig {
    let mut config = plain_descent(run, layout, dtype);
    config.optimizer.initial_loss_scale = 1024.0;
    config
}

#[rstest]
#[case("tp1")]
#[case("dp2")]
#[case("tp2")]
#[case("tp2-dp2-sp")]
fn an_update_is_that_of_an_f32_run_up_to_rounding(#[case] layout: &str) {
    let (found, update) = first_update(|run| descent(run, layout, Dtype::F16));
    let (expected, of_f32) = first_update(|run| descent(run, "tp1", Dtype::F32));
    assert!((found.loss_scale, found.skipped) == (Some(1024.0), false));
    assert!((expected.loss_scale, expected.skipped) == (None, false));
    assert!(
        relative(found.loss, expected.loss) < 2e-4,
        "{found:?} {expected:?}"
    );
    assert!(
        relative(found.grad_norm, expected.grad_norm) < 2e-3,
        "{found:?} {expected:?}"
    );
    // Compare updates, because the losses alone may round to the same number.
    assert!(update != of_f32, "it is no f16 run");
    assert_updates_close(&update, &of_f32, 5e-3, layout);
}

/// Without a loss scale, the gradients of a sample underflow in f16.
#[test]
fn the_scale_is_what_keeps_small_gradients() {
    let update = |scale| {
        let config = |run: &Run| {
            let mut config = plain_descent(run, "tp1", Dtype::F16);
            config.optimizer.loss_scale = Some(scale);
            config
        };
        first_update(config).1
    };
    let (_, of_f32) = first_update(|run| descent(run, "tp1", Dtype::F32));
    let distance = |update: &FullParams| {
        let of = |(name, found): (&String, &Vec<f32>)| relative_distance(found, &of_f32[name]);
        update.iter().map(of).fold(0.0, f64::max)
    };
    let small = distance(&update(2f64.powi(-9)));
    let right = distance(&update(1024.0));
    assert!(
        right < 5e-3 && small > 10.0 * right,
        "{right} with a scale, {small} with too small a one"
    );
}

#[test]
fn overflows_are_skipped_until_the_scale_fits() {
    let run = Run::new();
    let config = || config(&run, "tp2-dp2-sp", Dtype::F16);
    train(config(), 0);
    let before = saved(&run);
    let mut steps = train(config(), 8);
    assert!(
        steps
            .iter()
            .all(|step| step.skipped && step.loss.is_finite()),
        "{steps:?}"
    );
    assert_eq!(
        bits(&saved(&run)),
        bits(&before),
        "a skipped step changed something"
    );
    steps.extend(train(config(), 40));

    let skipped = steps.iter().take_while(|step| step.skipped).count();
    assert!((9..34).contains(&skipped), "{skipped}");
    // One overflow is tolerated; after that each overflow halves the scale.
    for (n, step) in (0..).zip(&steps[..=skipped]) {
        assert_eq!(
            step.loss_scale,
            Some(2f64.powi(32 - (n - 1).max(0))),
            "step {}",
            step.step
        );
        assert!(step.skipped == (n < skipped as i32));
    }
    // The schedule starts at the first update, which is one of three warm-up steps.
    let rates = [1e-2 / 3.0, 2e-2 / 3.0, 1e-2];
    for (step, lr) in steps[skipped..]
        .iter()
        .filter(|step| !step.skipped)
        .zip(rates)
    {
        assert!((step.lr - lr).abs() < 1e-12, "{step:?}");
        assert!(step.grad_norm.is_finite());
    }
    assert!(
        steps
            .iter()
            .zip(1..)
            .all(|(step, number)| step.step == number)
    );
    assert!(steps[39].loss < 0.9 * steps[0].loss, "it does not learn");
}

#[rstest]
fn a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    #[values("tp1", "tp2-dp2-sp")] layout: &str,
    #[values(1, 12)] until: u64,
) {
    let sets = [
        "train.dtype=f16",
        "optimizer.initial_loss_scale=8388608",
        "optimizer.decay_steps=24",
    ];
    let sets = [&sets[..], &["optimizer.loss_scale_window=4"]].concat();
    let whole = Run::new();
    let halves = Run::new();
    Ranks::threads(&whole.args(layout, 24, &sets)).finish();
    Ranks::threads(&halves.args(layout, until, &sets)).finish();
    Ranks::threads(&halves.args(layout, 24, &sets)).finish();
    assert_eq!(whole.numbers(), halves.numbers());
    let scales = |run: &Run| {
        run.steps()
            .iter()
            .map(|step| step.loss_scale)
            .collect::<Vec<_>>()
    };
    assert_eq!(scales(&whole), scales(&halves));
    assert_eq!(whole.tensors(24), halves.tensors(24));
    let skipped = whole
        .steps()
        .iter()
        .map(|step| step.skipped)
        .collect::<Vec<_>>();
    assert!(
        skipped[0] && skipped[1..].iter().any(|skipped| !skipped),
        "{skipped:?}"
    );
}

#[rstest]
#[case(Dtype::F32)]
#[case(Dtype::F16)]
fn a_gradient_above_the_threshold_changes_nothing(#[case] dtype: Dtype) {
    let norms = |threshold, layout| {
        let run = Run::new();
        let mut config = config(&run, layout, dtype);
        config.optimizer.initial_loss_scale = 1024.0;
        config.optimizer.grad_norm_skip_threshold = threshold;
        train(config, 12)
    };
    let free = norms(0.0, "tp1");
    let mut sorted: Vec<f64> = free.iter().map(|step| step.grad_norm).collect();
    sorted.sort_by(f64::total_cmp);
    for layout in ["tp1", "tp2-dp2-sp"] {
        let threshold = (sorted[5] + sorted[6]) / 2.0;
        let steps = norms(threshold, layout);
        for step in &steps {
            assert_eq!(step.skipped, step.grad_norm > threshold, "{step:?}");
        }
        assert!(steps.iter().any(|step| step.skipped), "{steps:?}");
    }
}

#[test]
fn a_run_that_only_skips_ends_with_the_reason() {
    let run = Run::new();
    let sets = [
        "optimizer.grad_norm_skip_threshold=1e-6",
        "train.eval_interval=0",
    ];
    let ended = Ranks::threads(&run.args("tp1", 300, &sets))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("step 100 is the last of 100 skipped steps in a row")
    );
    assert_eq!(run.steps().len(), 99);
    assert!(
        run.steps()
            .iter()
            .all(|step| step.skipped && step.lr < 0.34e-2)
    );
}

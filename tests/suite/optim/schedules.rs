//! Schedules over full runs: a batch ramp, and learning rates that follow the samples.

use megaburn::{
    data::BatchSchedule,
    train::{TrainConfig, config::Dtype},
};
use rstest::rstest;

use crate::{
    precision::bf16::{first_update, plain_descent, relative},
    runs::child::Ranks,
    runs::resume::train,
};
use megaburn_test_support::run::Run;

/// 10 steps of 2 samples, 5 of 4, 4 of 6 (the last ends at 64), and then 8.
const RAMP: [&str; 3] = [
    "train.batch_ramp.start=2",
    "train.batch_ramp.increment=2",
    "train.batch_ramp.samples=60",
];

fn ramped(run: &Run, layout: &str, steps: u64) -> TrainConfig {
    let mut config = run.config(layout, steps);
    config.train.batch_ramp = Some(megaburn::train::config::BatchRampConfig {
        start: 2,
        increment: 2,
        samples: 60,
    });
    config
}

#[test]
fn a_batch_that_grows_trains_alike_under_every_layout() {
    let run = Run::new();
    let one = train(ramped(&run, "tp1", 24), 24, 0);
    let expected =
        [20, 40, 64].map(|read| BatchSchedule::ramp(2, 2, 60, 8).unwrap().batch_size(read));
    assert_eq!(expected, [4, 6, 8]);
    let read: Vec<u64> = one.samples.entries().map(|(number, _)| number).collect();
    assert_eq!(
        read.len() as u64,
        BatchSchedule::ramp(2, 2, 60, 8).unwrap().samples_after(24)
    );
    assert!(read.iter().copied().eq(0..read.len() as u64), "{read:?}");
    for layout in ["dp2", "tp2-sp", "tp2-dp2-sp"] {
        let found = train(ramped(&run, layout, 24), 24, 0);
        assert!(found.samples == one.samples, "{layout} reads other samples");
        for (found, expected) in found.losses.iter().zip(&one.losses) {
            assert!(
                (found - expected).abs() <= 1e-4,
                "{layout}: loss {found} and {expected}"
            );
        }
    }
    let plain = train(run.config("tp1", 24), 24, 0);
    assert_ne!(plain.losses[..3], one.losses[..3], "the ramp did nothing");
}

#[rstest]
#[case("tp1", &[])]
#[case("tp2-dp2-sp", &[])]
#[case("tp1", &["optimizer.lr_decay_style=wsd", "optimizer.wsd_decay_steps=4"])]
#[case("tp1", &["optimizer.end_weight_decay=0.5", "optimizer.decoupled_lr=1e-3"])]
fn a_run_resumed_on_a_ramp_equals_the_uninterrupted_one_to_the_bit(
    #[case] layout: &str,
    #[case] sets: &[&str],
) {
    let sets = [&RAMP[..], sets].concat();
    let whole = Run::new();
    let halves = Run::new();
    let end = ["optimizer.decay_steps=24", "train.checkpoint_interval=0"];
    let sets = [&sets[..], &end].concat();
    Ranks::threads(&whole.args(layout, 24, &sets)).finish();
    // Without weight_decay_steps the weight decay changes over the full run, so stop the run
    // instead of finishing it early.
    for until in ["13", "24"] {
        let interval = format!("train.checkpoint_interval={until}");
        let sets = [&sets[..], &[interval.as_str()]].concat();
        Ranks::threads(&halves.args(layout, 24, &sets)).finish();
        if until == "13" {
            std::fs::remove_dir_all(halves.checkpoints().join("step-00000024")).unwrap();
        }
    }
    assert_eq!(whole.numbers().len(), 24);
    assert_eq!(whole.numbers(), halves.numbers());
    assert_eq!(whole.tensors(24), halves.tensors(24));
    let tokens: Vec<u64> = whole.steps().iter().map(|step| step.tokens / 16).collect();
    assert_eq!(
        tokens[..16],
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 6]
    );
    assert_eq!(tokens[19..], [8; 5]);
}

#[test]
fn the_rate_is_that_of_the_samples() {
    let run = Run::new();
    let wsd = [
        "optimizer.lr_decay_style=wsd",
        "optimizer.wsd_decay_style=linear",
    ];
    let more = [
        "optimizer.wsd_decay_steps=4",
        "optimizer.warmup_fraction=0.1",
    ];
    let sets = [
        &RAMP[..],
        &wsd,
        &more,
        &["optimizer.min_lr=0", "optimizer.decay_steps=26"],
    ];
    Ranks::threads(&run.args("tp1", 24, &sets.concat())).finish();
    let mut samples = 0;
    for step in run.steps() {
        samples += step.tokens / 16;
        let expected = match samples {
            0..=12 => 1e-2 * samples as f64 / 12.0,
            13..=88 => 1e-2,
            89..=120 => 1e-2 * (120 - samples) as f64 / 32.0,
            _ => 0.0,
        };
        assert!(
            (step.lr - expected).abs() < 1e-12,
            "{samples}: {} is not {expected}",
            step.lr
        );
    }
    assert!(samples > 100, "the decay was not reached");
}

/// Plain descent: an update is the learning rate times the gradient.
#[test]
fn embedding_and_head_move_at_their_own_rate() {
    let update = |decoupled_lr| {
        let config = |run: &Run| {
            let mut config = plain_descent(run, "tp2", Dtype::F32);
            config.model.tied = false;
            config.optimizer.decoupled_lr = decoupled_lr;
            config
        };
        first_update(config).1
    };
    let all = update(None);
    let own = update(Some(250.0));
    let length = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    for (name, found) in &own {
        let found = length(found);
        let expected = length(&all[name]);
        let is_own = name.starts_with("model.embedding.") || name.starts_with("model.head.");
        // Equal except for the minimum at the schedule's end, which both rates share.
        let ratio = if is_own { 0.25 } else { 1.0 };
        assert!(
            relative(found, ratio * expected) < 1e-2,
            "{name}: {found} of {expected}"
        );
    }
}

#[test]
fn an_update_uses_the_weight_decay_of_its_samples() {
    let update = |start, end| {
        let config = |run: &Run| {
            let mut config = plain_descent(run, "tp1", Dtype::F32);
            config.optimizer.weight_decay = start;
            config.optimizer.end_weight_decay = end;
            config
        };
        first_update(config).1
    };
    // The first of twenty updates, from 0 to 0.002.
    let found = update(0.0, Some(2e-3));
    let expected = update(1e-4, None);
    assert_ne!(found, update(0.0, None));
    assert_eq!(found, expected);
}

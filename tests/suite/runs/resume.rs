//! A run that was interrupted continues as if it had not been.

use std::sync::Arc;

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    data::SampleLog,
    mesh::Layout,
    train::{RunData, TrainConfig, TrainError, Trainer},
};
use rstest::rstest;

use crate::runs::child::Ranks;
use megaburn_test_support::run::{Run, STEPS};

#[rstest]
fn a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    #[values("tp1", "tp2-dp2-sp")] layout: &str,
    #[values("train.dtype=f32", "train.dtype=bf16")] dtype: &str,
) {
    let whole = Run::new();
    let halves = Run::new();
    Ranks::threads(&whole.args(layout, STEPS, &[dtype])).finish();
    Ranks::threads(&halves.args(layout, STEPS / 2, &[dtype])).finish();
    assert_eq!(halves.steps().len() as u64, STEPS / 2);
    Ranks::threads(&halves.args(layout, STEPS, &[dtype])).finish();
    assert_eq!(whole.numbers().len() as u64, STEPS);
    assert_eq!(whole.numbers(), halves.numbers());
    let tensors = whole.tensors(STEPS);
    assert!(
        tensors.iter().map(Vec::len).sum::<usize>() > 1 << 16,
        "weights and moments"
    );
    assert_eq!(tensors, halves.tensors(STEPS));
}

/// The samples that some steps of a run read, and the losses of these steps.
#[derive(Debug, Default)]
pub(crate) struct Stretch {
    pub(crate) samples: SampleLog,
    pub(crate) losses: Vec<f64>,
    pub(crate) learning_rates: Vec<f64>,
}

/// Checks that a resumed run under another layout has the same losses as `whole` had after its
/// first `done` steps.
pub(crate) fn assert_goes_on(resumed: &Stretch, whole: &Stretch, done: u64, layout: &str) {
    let expected = &whole.losses[done as usize..];
    assert!(!expected.is_empty() && resumed.losses.len() == expected.len());
    for (found, expected) in resumed.losses.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 1e-4,
            "{layout}: loss {found} and {expected}"
        );
    }
}

/// Resumes the run in `run.dir` and trains to step `until`, saving after step `save_at`.
pub(crate) fn train(config: TrainConfig, until: u64, save_at: u64) -> Stretch {
    let layout = config.layout(None).unwrap();
    let data = Arc::new(RunData::load(&config).unwrap());
    let options = GroupOptions {
        seed: config.run.seed,
        ..Default::default()
    };
    let config = Arc::new(config);
    let ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        trainer.resume()?;
        let mut stretch = Stretch::default();
        while trainer.progress().step < until {
            let micro_batches = 0..trainer.num_micro_batches();
            for index in micro_batches {
                let (numbers, samples) = trainer.micro_batch(index)?;
                for (number, sample) in numbers.zip(samples) {
                    stretch.samples.record(number, &sample.into_tokens())?;
                }
            }
            let step = trainer.step()?;
            stretch.losses.push(step.loss);
            stretch.learning_rates.push(step.lr);
            if trainer.progress().step == save_at {
                trainer.save()?;
            }
        }
        Ok::<_, TrainError>(stretch)
    });
    let mut whole = Stretch::default();
    for rank in ranks.into_iter().map(Result::unwrap) {
        whole.samples.merge(rank.samples.entries()).unwrap();
        whole.losses = rank.losses;
        whole.learning_rates = rank.learning_rates;
    }
    whole
}

#[test]
fn five_other_layouts_resume_with_the_same_samples_and_losses() {
    const HALF: u64 = STEPS / 2;
    let run = Run::new();
    let batch = run.config("tp1", STEPS).train.global_batch as u64;
    let whole = train(run.config("tp2-dp2-sp", STEPS), STEPS, HALF);
    let mut expected = SampleLog::new();
    let second_half = whole
        .samples
        .entries()
        .filter(|(number, _)| *number >= HALF * batch);
    expected.merge(second_half).unwrap();

    for layout in ["tp1", "dp4", "tp4-sp", "tp2", "tp2-dp4"] {
        let resumed = train(run.config(layout, STEPS), STEPS, 0);
        assert_eq!(
            resumed.samples.entries().count() as u64,
            HALF * batch,
            "{layout}"
        );
        assert!(resumed.samples == expected, "{layout} reads other samples");
        let losses = resumed.losses.iter().zip(&whole.losses[HALF as usize..]);
        assert_eq!(losses.len() as u64, HALF);
        for (step, (found, expected)) in (HALF + 1..).zip(losses) {
            let difference = (found - expected).abs();
            assert!(
                difference <= 1e-4,
                "{layout}, step {step}: loss {found} and {expected}"
            );
        }
    }
}

#[test]
fn the_first_thousand_samples_are_the_same_for_every_data_parallel_degree() {
    let run = Run::new();
    let digest = |layout: Layout, micro_batch| {
        let mut config = run.config(&layout.to_string(), 25);
        config.model.hidden = 8;
        config.model.ffn = 8;
        config.model.layers = 1;
        config.train.global_batch = 40;
        config.train.micro_batch = micro_batch;
        train(config, 25, 0)
            .samples
            .digest(1000)
            .expect("25 steps of 40 samples")
    };
    let one = digest(Layout::SINGLE, 40);
    for (dp, micro_batch) in [(2, 4), (4, 10), (5, 1), (8, 5)] {
        assert_eq!(
            digest(
                Layout {
                    dp,
                    ..Layout::SINGLE
                },
                micro_batch
            ),
            one,
            "dp {dp}"
        );
    }
}

//! Every layout computes one rank's gradients from the same weights.
//!
//! The comparison covers each step alone, because one update already makes weights differ: before
//! each step a layout loads the weights of the one rank.

use std::{fs, path::Path};

use megaburn::{
    checkpoint::newest,
    train::{TrainConfig, config::Dtype},
};
use rstest::rstest;

use crate::precision::bf16::{config, saved, train};
use megaburn_test_support::{
    gather::{FullParams, relative_distance},
    run::Run,
};

const STEPS: u64 = 10;
/// The largest relative difference of a parameter's gradient.
const TOLERANCE: f64 = 1e-5;

/// Layout, samples of a micro-batch, `parallel.zero` and `parallel.zero_ranks`.
const LAYOUTS: [(&str, usize, u8, Option<usize>); 20] = [
    ("tp1", 1, 0, None),
    ("dp2", 1, 0, None),
    ("dp4", 2, 0, None),
    ("dp8", 1, 0, None),
    ("tp2", 4, 0, None),
    ("tp2-sp", 8, 0, None),
    ("tp4", 2, 0, None),
    ("tp4-sp", 8, 0, None),
    ("tp2-dp2", 4, 0, None),
    ("tp2-dp2-sp", 1, 0, None),
    ("tp4-dp2-sp", 2, 0, None),
    ("dp4", 1, 1, None),
    ("dp4", 1, 2, None),
    ("dp8", 1, 1, Some(4)),
    ("tp2-dp2-sp", 2, 2, None),
    ("tp2-dp4", 1, 2, Some(2)),
    ("tp2-dp4-sp", 2, 1, None),
    ("dp4", 1, 3, None),
    ("tp2-dp2-sp", 2, 3, None),
    ("tp2-dp4", 1, 3, Some(2)),
];

/// The configuration of a run whose first moment equals the gradient of the update: summed over
/// micro-batches and ranks, divided by the tokens, and not clipped.
fn keeping_gradients(run: &Run, layout: &str, tied: bool) -> TrainConfig {
    let mut config = config(run, layout, Dtype::F32);
    config.model.tied = tied;
    config.optimizer.beta1 = 0.0;
    config.optimizer.clip_grad = 0.0;
    // Without momentum every element moves by the learning rate. At the usual rate, ten steps lead
    // to weights that magnify the rounding of tensor-parallel sums a hundredfold.
    config.optimizer.lr = 1e-3;
    config
}

/// The gradients of every parameter in the newest step.
fn gradients(run: &Run) -> FullParams {
    let all = saved(run);
    let params = all.keys().filter(|name| name.starts_with("model.")).count();
    let of_grad = |(name, values): (&String, &Vec<f32>)| {
        Some((name.strip_prefix("exp_avg.")?.to_string(), values.clone()))
    };
    let grads: FullParams = all.iter().filter_map(of_grad).collect();
    assert_eq!(grads.len(), params, "a parameter has no gradient");
    grads
}

/// Copies a checkpoint to another run, as its only one.
fn hand_over(checkpoint: &Path, to: &Run) {
    let dir = to.checkpoints();
    if dir.exists() {
        fs::remove_dir_all(&dir).unwrap();
    }
    let copy = dir.join(checkpoint.file_name().unwrap());
    fs::create_dir_all(&copy).unwrap();
    for file in fs::read_dir(checkpoint).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
}

/// A layout computes every other step with tied embeddings and the rest with untied ones. The two
/// cases together contain every pair of a layout and a step.
#[rstest]
fn every_layout_computes_one_ranks_gradients_at_each_of_ten_steps(
    #[values(true, false)] tied: bool,
) {
    let one = Run::new();
    // Compute the full batch at once.
    let mut of_one = keeping_gradients(&one, "tp1", tied);
    of_one.train.micro_batch = of_one.train.global_batch;
    train(of_one.clone(), 0);
    let runs = LAYOUTS.map(|layout| (layout, Run::new()));
    let mut largest = (0.0, String::new());
    let mut before = FullParams::new();
    for step in 0..STEPS {
        let checkpoint = newest(&one.checkpoints())
            .unwrap()
            .checkpoint
            .unwrap()
            .path()
            .to_path_buf();
        let runs: Vec<_> = runs
            .iter()
            .zip(0_u64..)
            .filter(|(_, index)| (index + step) % 2 == u64::from(tied))
            .map(|(run, _)| run)
            .collect();
        runs.iter().for_each(|(_, run)| hand_over(&checkpoint, run));
        train(of_one.clone(), step + 1);
        let expected = gradients(&one);
        for (path, grad) in &expected {
            assert!(
                grad.iter().any(|value| *value != 0.0),
                "the gradient of {path} is zero"
            );
            let moved = before
                .get(path)
                .is_none_or(|before| relative_distance(before, grad) > 0.1);
            assert!(
                moved,
                "step {step}: the gradient of {path} is that of the step before"
            );
        }
        for ((layout, micro_batch, zero, zero_ranks), run) in runs {
            let mut config = keeping_gradients(run, layout, tied);
            config.train.micro_batch = *micro_batch;
            let parallel = &mut config.parallel;
            parallel.zero = *zero;
            parallel.zero_ranks = *zero_ranks;
            // Several buckets, and parameters that are split over ranks.
            parallel.bucket_size = Some(3000);
            let steps = train(config, step + 1).len();
            assert_eq!(
                steps, 1,
                "{layout} did not go on from the one rank's weights"
            );
            let found = gradients(run);
            assert!(
                found.keys().eq(expected.keys()),
                "{layout}: other parameters"
            );
            for (path, found) in &found {
                let distance = relative_distance(found, &expected[path]);
                let what = format!("{layout}, zero {zero}, step {step}: {path}");
                assert!(distance < TOLERANCE, "{what} differs by {distance:e}");
                if distance > largest.0 {
                    largest = (distance, what);
                }
            }
        }
        before = expected;
    }
    let (distance, what) = largest;
    println!("the largest distance is {distance:e}: {what}");
}

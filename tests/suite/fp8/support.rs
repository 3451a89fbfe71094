//! Runs of small models with quantised matrices.

use std::{path::Path, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    report::metrics::StepMetrics,
    train::{ConfigLayers, RunData, TrainConfig, TrainError, Trainer},
};
use megaburn_test_support::text::write_random_text;

/// A model of two layers whose splits over two ranks do not cut blocks of 128.
const MODEL: &str = "
[model]
hidden = 32
ffn = 256
layers = 2
heads = 2
kv_heads = 2
head_dim = 128
[data]
seq_len = 32
[train]
global_batch = 8
micro_batch = 4
[optimizer]
lr = 1e-3
eps = 1e-5
warmup_steps = 0
[generate]
tokens = 0
";

/// The configuration of a run in `dir`, with some keys set.
pub(super) fn config(dir: &Path, sets: &[&str], layout: &str) -> TrainConfig {
    let data = dir.join("text.txt");
    if !data.exists() {
        write_random_text(&data, 40_000, 11);
    }
    let run = format!("run.dir={}", dir.join("run").display());
    let data = format!("data.path={}", data.display());
    let sets = sets.iter().copied().chain([run.as_str(), data.as_str()]);
    let layers = ConfigLayers::new().with_text("fp8", MODEL).unwrap();
    let layers = sets.fold(layers, |layers, set| layers.with_set(set).unwrap());
    layers.with_layout(layout).unwrap().load().unwrap()
}

/// Runs `body` on each rank's trainer, and returns the results in rank order.
pub(crate) fn on_trainers<T: Send>(
    config: &TrainConfig,
    body: impl Fn(Trainer) -> Result<T, TrainError> + Sync,
) -> Vec<T> {
    let layout = config.layout(None).unwrap();
    let data = Arc::new(RunData::load(config).unwrap());
    let options = GroupOptions {
        seed: config.run.seed,
        ..Default::default()
    };
    let config = Arc::new(config.clone());
    let ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        body(Trainer::new(config.clone(), groups, device, data.clone())?)
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

/// Trains `num` steps from the beginning; returns loss and gradient norm of each.
pub(super) fn train(config: &TrainConfig, num: usize) -> Vec<[f64; 2]> {
    let mut ranks = on_trainers(config, |mut trainer| {
        (0..num)
            .map(|_| trainer.step())
            .collect::<Result<Vec<_>, _>>()
    });
    numbers(&ranks.swap_remove(0))
}

/// Loss and gradient norm of each step.
pub(super) fn numbers(steps: &[StepMetrics]) -> Vec<[f64; 2]> {
    steps
        .iter()
        .map(|step| [step.loss, step.grad_norm])
        .collect()
}

/// The largest relative differences of losses and of gradient norms.
pub(super) fn distances(found: &[[f64; 2]], expected: &[[f64; 2]]) -> [f64; 2] {
    assert_eq!(found.len(), expected.len());
    let largest = |index: usize| {
        let pairs = found.iter().zip(expected);
        let off = pairs.map(|(a, b)| (a[index] - b[index]).abs() / b[index].abs());
        off.fold(0.0, f64::max)
    };
    [largest(0), largest(1)]
}

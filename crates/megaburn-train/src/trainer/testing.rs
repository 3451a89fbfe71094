//! Trainers of a small model on rank threads, for tests that may modify their fields.

use std::{collections::BTreeMap, sync::Arc};

use burn::{prelude::Device, tensor::TensorData};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_parallel::{load_params, read_params};

use crate::{config::ConfigLayers, data::RunData, error::TrainError, trainer::Trainer};

pub(crate) const CONFIG: &str = "
[model]
hidden = 16
ffn = 32
layers = 2
heads = 4
kv_heads = 2
[data]
seq_len = 8
[train]
global_batch = 12
micro_batch = 1
[optimizer]
warmup_steps = 0
";

/// Runs `body` on each rank's trainer, with some keys set, and returns the results in rank order.
pub(crate) fn trainers<T: Send>(
    sets: &[&str],
    layout: &str,
    body: impl Fn(Trainer) -> Result<T, TrainError> + Sync,
) -> Vec<T> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt");
    std::fs::write(&file, "It was the best of times. ".repeat(100)).unwrap();
    let layers = ConfigLayers::new().with_text("testing.rs", CONFIG).unwrap();
    let layers = layers
        .with_data(&file.to_string_lossy())
        .unwrap()
        .with_layout(layout)
        .unwrap();
    let layers = sets
        .iter()
        .fold(layers, |layers, set| layers.with_set(set).unwrap());
    let config = Arc::new(layers.load().unwrap());
    let data = Arc::new(RunData::load(&config).unwrap());
    let layout = config.layout(None).unwrap();
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        body(Trainer::new(
            config.clone(),
            groups,
            Device::flex().autodiff(),
            data.clone(),
        )?)
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

/// Sets the last element of this rank's copy of a parameter to `value`.
pub(crate) fn poison(trainer: &mut Trainer, param: &str, value: f32) {
    let mut params: BTreeMap<_, _> = read_params(trainer.model()).into_iter().collect();
    let shape = params[param].shape().clone();
    let mut values: Vec<f32> = params[param].try_to_vec().unwrap();
    *values.last_mut().unwrap() = value;
    params.insert(param.to_string(), TensorData::new(values, shape));
    let model = trainer.take_model();
    let next = |path: &str, _: &[usize]| Ok::<_, TrainError>(params.remove(path).unwrap());
    trainer.core.model = Some(load_params(model, next).unwrap());
}

//! Trainings of three steps.

use std::{fs, path::PathBuf, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Group, ProcessGroups},
    mesh::Layout,
    train::{ConfigLayers, RunData, TrainConfig, TrainError, Trainer},
};
use megaburn_test_support::{
    gather::{gather, local_params},
    text::write_random_words,
};

use crate::world::{Over, Values, on_ranks};

const CONFIG: &str = "
[model]
hidden = 32
ffn = 48
layers = 2
heads = 4
kv_heads = 2

[data]
seq_len = 16

[train]
global_batch = 4
micro_batch = 1

# With a small epsilon, AdamW moves an element whose gradient is nothing but rounding as far as any.
[optimizer]
lr = 1e-3
eps = 1e-5
warmup_steps = 0
";

/// A training: how its ranks are connected, their layout, and its settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Training {
    pub(crate) over: Over,
    pub(crate) layout: &'static str,
    pub(crate) sets: &'static [&'static str],
}

impl Training {
    pub(crate) const fn new(layout: &'static str, sets: &'static [&'static str]) -> Self {
        let over = Over::Threads;
        Self { over, layout, sets }
    }

    pub(crate) const fn over_tcp(self) -> Self {
        let over = Over::Tcp;
        Self { over, ..self }
    }

    /// The same training on one rank.
    pub(crate) const fn alone(self) -> Self {
        let layout = "tp1";
        Self {
            over: Over::Threads,
            layout,
            ..self
        }
    }

    fn config(&self) -> Result<TrainConfig, TrainError> {
        let layers = ConfigLayers::new().with_text("backends", CONFIG)?;
        let mut layers = layers.with_data(&text().display().to_string())?;
        for set in self.sets {
            layers = layers.with_set(set)?;
        }
        layers.load()
    }

    /// The losses and gradient norms of three steps and the evaluated loss after them, and the weights.
    pub(crate) fn run(&self, device: &Device) -> Result<Values, String> {
        let text = |error: TrainError| error.to_string();
        let layout = self.layout.parse::<Layout>();
        let layout = layout.map_err(|error| error.to_string())?;
        let config = Arc::new(self.config().map_err(text)?);
        let data = Arc::new(RunData::load(&config).map_err(text)?);
        let ranks = on_ranks(
            self.over,
            layout.world_size(),
            config.run.seed,
            |world: Group| {
                let groups = ProcessGroups::new(&world, layout)?;
                let device = device.clone().autodiff();
                let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
                let mut numbers = Vec::new();
                for _ in 0..3 {
                    let step = trainer.step()?;
                    numbers.extend([step.loss as f32, step.grad_norm as f32]);
                }
                numbers.push(trainer.evaluate()?.eval_loss as f32);
                Ok::<_, TrainError>((numbers, local_params(&trainer)?))
            },
        )?;
        let (mut numbers, params): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
        if numbers.iter().any(|of_rank| *of_rank != numbers[0]) {
            return Err(format!("the ranks report different losses: {numbers:?}"));
        }
        let mut values = gather(&params);
        values.insert("losses and gradient norms".into(), numbers.remove(0));
        Ok(values)
    }
}

/// A text that all trainings of this process read.
fn text() -> PathBuf {
    let name = format!("megaburn-backends-{}.txt", std::process::id());
    let path = std::env::temp_dir().join(name);
    if !path.exists() {
        write_random_words(&path, 1500, 7);
    }
    path
}

/// Removes the text.
pub(crate) fn clean() {
    fs::remove_file(text()).ok();
}

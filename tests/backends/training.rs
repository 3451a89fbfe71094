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

/// The number of steps.
const STEPS: u64 = 3;

/// A training: how its ranks are connected, their layout, and its settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Training {
    pub(crate) layout: &'static str,
    over: Over,
    sets: &'static [&'static str],
    /// Whether each step is taken by a new trainer, which resumes from a checkpoint of the last one: the
    /// second step on Flex, the others on the backend.
    moves: bool,
}

impl Training {
    pub(crate) const fn new(layout: &'static str, sets: &'static [&'static str]) -> Self {
        Self {
            layout,
            over: Over::Threads,
            sets,
            moves: false,
        }
    }

    pub(crate) const fn over_tcp(self) -> Self {
        Self {
            over: Over::Tcp,
            ..self
        }
    }

    pub(crate) const fn moving(self) -> Self {
        Self {
            moves: true,
            ..self
        }
    }

    /// The same training on one rank, without checkpoints.
    pub(crate) const fn alone(self) -> Self {
        Self::new("tp1", self.sets)
    }

    fn config(&self) -> Result<TrainConfig, TrainError> {
        let layers = ConfigLayers::new().with_text("backends", CONFIG)?;
        let mut layers = layers.with_data(&text().display().to_string())?;
        for set in self.sets {
            layers = layers.with_set(set)?;
        }
        layers.load()
    }

    /// The losses and gradient norms of the steps and the evaluated loss after them, and the weights.
    pub(crate) fn run(&self, device: &Device) -> Result<Values, String> {
        let mut config = self.config().map_err(|error| error.to_string())?;
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        config.run.dir = folder.path().join("run").display().to_string();
        let data = RunData::load(&config).map_err(|error| error.to_string())?;
        let (config, data) = (Arc::new(config), Arc::new(data));

        let flex = Device::flex();
        let devices = if self.moves {
            vec![device, &flex, device]
        } else {
            vec![device]
        };
        let mut numbers = Vec::new();
        let mut values = Values::new();
        for device in devices {
            let (of_part, weights) = self.part(config.clone(), data.clone(), device)?;
            numbers.extend(of_part);
            values = weights;
        }
        values.insert("losses and gradient norms".into(), numbers);
        Ok(values)
    }

    /// The numbers of the next steps, and the weights after them.
    fn part(
        &self,
        config: Arc<TrainConfig>,
        data: Arc<RunData>,
        device: &Device,
    ) -> Result<(Vec<f32>, Values), String> {
        let layout = self.layout.parse::<Layout>();
        let layout = layout.map_err(|error| error.to_string())?;
        let size = layout.world_size();
        let ranks = on_ranks(self.over, size, config.run.seed, |world: Group| {
            let groups = ProcessGroups::new(&world, layout)?;
            let device = device.clone().autodiff();
            let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
            if self.moves {
                trainer.resume()?;
            }
            let mut numbers = Vec::new();
            while trainer.progress().step < STEPS {
                let step = trainer.step()?;
                numbers.extend([step.loss as f32, step.grad_norm as f32]);
                if self.moves {
                    trainer.save()?;
                    break;
                }
            }
            if trainer.progress().step == STEPS {
                numbers.push(trainer.evaluate()?.eval_loss as f32);
            }
            Ok::<_, TrainError>((numbers, local_params(&trainer)?))
        })?;
        let (mut numbers, params): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
        if numbers.iter().any(|of_rank| *of_rank != numbers[0]) {
            return Err(format!("the ranks report different losses: {numbers:?}"));
        }
        Ok((numbers.remove(0), gather(&params)))
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

//! The training loop of one rank.

mod batch;
mod evaluate;
mod sample;
mod save;
mod stats;
mod step;

use std::{path::PathBuf, sync::Arc};

use burn::prelude::Device;
use megaburn_collective::ProcessGroups;
use megaburn_data::{GlobalBatch, Sampler};
use megaburn_mesh::ShardPlan;
use megaburn_models::{Llama, LlamaConfig};
use megaburn_optim::{AdamW, AdamWConfig, GradientAccumulator};
use megaburn_parallel::shard_plan;

use crate::{TrainConfig, TrainError, data::RunData, schedule::LrSchedule};

pub(crate) use stats::agree_to_stop;

/// Everything a rank trains with.
#[derive(Debug)]
pub(crate) struct Trainer {
    config: Arc<TrainConfig>,
    model_config: LlamaConfig,
    groups: ProcessGroups,
    device: Device,
    /// Always there, but while the optimizer turns it into the next one.
    model: Option<Llama>,
    plan: ShardPlan,
    grads: GradientAccumulator,
    optimizer: AdamW,
    schedule: LrSchedule,
    train: Sampler,
    valid: Sampler,
    batch: GlobalBatch,
    data: Arc<RunData>,
    progress: Progress,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Progress {
    /// Optimizer steps done.
    pub(crate) step: u64,
    /// Training samples read.
    pub(crate) consumed_samples: u64,
}

impl Trainer {
    /// A freshly drawn model with nothing learnt.
    ///
    /// # Collective
    /// Nothing is sent.
    pub(crate) fn new(
        config: Arc<TrainConfig>,
        groups: ProcessGroups,
        device: Device,
        data: Arc<RunData>,
    ) -> Result<Self, TrainError> {
        let layout = groups.layout();
        let model_config = config.model.llama(&config.data, data.vocab());
        model_config.check_layout(&layout, config.data.seq_len)?;
        let model = model_config.init(&groups.tp, layout.sp, &device)?;
        let plan = shard_plan(&model).map_err(megaburn_models::ModelError::from)?;
        let optimizer = &config.optimizer;
        let adamw = AdamWConfig::new()
            .with_beta_1(optimizer.beta1)
            .with_beta_2(optimizer.beta2)
            .with_epsilon(optimizer.eps)
            .with_weight_decay(optimizer.weight_decay);
        let seq_len = config.data.seq_len;
        Ok(Self {
            grads: GradientAccumulator::new(&model, &plan)?,
            optimizer: adamw.init()?,
            schedule: optimizer.schedule(config.train.steps),
            train: Sampler::shuffled(data.train.clone(), seq_len, config.run.seed)?,
            valid: Sampler::sequential(data.valid.clone(), seq_len)?,
            batch: GlobalBatch::new(
                config.train.global_batch,
                config.train.micro_batch,
                layout.dp,
            )?,
            model: Some(model),
            plan,
            model_config,
            groups,
            device,
            data,
            progress: Progress::default(),
            config,
        })
    }

    pub(crate) fn progress(&self) -> Progress {
        self.progress
    }

    pub(crate) fn model_config(&self) -> &LlamaConfig {
        &self.model_config
    }

    /// Whether all steps are done.
    pub(crate) fn is_finished(&self) -> bool {
        self.progress.step >= self.config.train.steps
    }

    fn model(&self) -> &Llama {
        self.model.as_ref().expect("the model is only away during an update")
    }

    /// Folder of the checkpoints.
    fn checkpoints(&self) -> PathBuf {
        PathBuf::from(&self.config.run.dir).join("checkpoints")
    }
}

//! Estimates the memory that each rank of a run needs, by formula, before anything is allocated.
//!
//! Parameters, accumulated gradients and optimizer state are counted from the rank's shards, and
//! activations by [`megaburn_models::activation_memory`]. The memory of kernels, collectives and
//! the allocator is not included: leave a tenth of a GPU free for them.

mod checkpoint;
mod held;
mod parts;
mod state;

use std::fmt;

pub use checkpoint::CheckpointShare;
use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
pub use megaburn_models::activation_memory::Scores;
use megaburn_pipeline::PreparedSchedule;
pub use parts::PartParams;
pub use state::RankParams;

use crate::{config::TrainConfig, error::TrainError};

/// Bytes that one rank holds at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Parameters in the type that layers compute with, including the buckets that are gathered
    /// with `parallel.zero = 3`.
    pub parameters: usize,
    /// Accumulated gradients, including the buckets in flight with `parallel.zero` 2 or 3.
    pub gradients: usize,
    /// Masters and moments on the device.
    pub optimizer: usize,
    /// Activations saved for backward of all micro-batches in flight, and those that backward
    /// recomputes.
    pub activations: usize,
}

impl MemoryEstimate {
    /// Estimates the rank of each pipeline stage, in rank order, for a model that does not start
    /// from another one. If `model.vocab` is not set, the vocabulary of the byte tokenizer is
    /// assumed.
    ///
    /// `scores` says whether attention keeps its scores, as it does on CPUs and in f32.
    ///
    /// # Errors
    /// The layout does not split the model or the batch.
    pub fn of_stages(
        config: &TrainConfig,
        layout: &Layout,
        scores: Scores,
    ) -> Result<Vec<Self>, TrainError> {
        let model = config.planned_model(layout)?;
        let params = RankParams::of_stages(config, layout, &model)?;
        Self::of_params(config, layout, &model, &params, scores)
    }

    /// As [`of_stages`](Self::of_stages), for a model whose parameters on the rank of each pipeline
    /// stage are known. They depend on `model` and the degrees tp, ep, etp and pp only.
    ///
    /// # Errors
    /// As [`of_stages`](Self::of_stages).
    pub fn of_params(
        config: &TrainConfig,
        layout: &Layout,
        model: &DecoderConfig,
        params: &[RankParams],
        scores: Scores,
    ) -> Result<Vec<Self>, TrainError> {
        let schedule = held::schedule(config, layout)?;
        Self::of_schedule(config, layout, model, params, &schedule, scores)
    }

    /// As [`of_params`](Self::of_params), for a schedule that is known too.
    ///
    /// # Errors
    /// As [`of_stages`](Self::of_stages).
    pub fn of_schedule(
        config: &TrainConfig,
        layout: &Layout,
        model: &DecoderConfig,
        params: &[RankParams],
        schedule: &PreparedSchedule,
        scores: Scores,
    ) -> Result<Vec<Self>, TrainError> {
        let held = Self::activations(config, layout, model, schedule, scores)?;
        let with = |(params, activations): (&RankParams, usize)| Self {
            activations,
            ..params.bytes(config, layout)
        };
        Ok(params.iter().zip(held).map(with).collect())
    }

    /// The bytes of activations on the rank of each pipeline stage, in rank order. They do not depend
    /// on ep, `parallel.zero` and, for the same schedule, dp.
    ///
    /// # Errors
    /// As [`of_stages`](Self::of_stages).
    pub fn activations(
        config: &TrainConfig,
        layout: &Layout,
        model: &DecoderConfig,
        schedule: &PreparedSchedule,
        scores: Scores,
    ) -> Result<Vec<usize>, TrainError> {
        let stages = config.parallel.stages(layout, model.layers)?;
        held::of_stages(config, layout, model, &stages, schedule, scores)
    }

    /// The estimate of the rank that needs most.
    ///
    /// # Errors
    /// As [`of_stages`](Self::of_stages).
    pub fn largest(
        config: &TrainConfig,
        layout: &Layout,
        scores: Scores,
    ) -> Result<Self, TrainError> {
        let stages = Self::of_stages(config, layout, scores)?;
        Ok(stages
            .into_iter()
            .max_by_key(Self::total)
            .unwrap_or_default())
    }

    /// The number of ranks over which `parallel.zero` above 0 shards what belongs to a parameter:
    /// of an expert, or another.
    pub fn num_shares(config: &TrainConfig, layout: &Layout, is_expert: bool) -> usize {
        state::shares(config, layout, is_expert)
    }

    /// The sum of all parts.
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.optimizer + self.activations
    }
}

/// `62.3 GB: parameters 16.1, gradients 4.7, optimizer 12.0, activations 29.5`.
impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: usize| bytes as f64 / 1e9;
        write!(
            f,
            "{:.1} GB: parameters {:.1}, gradients {:.1}, optimizer {:.1}, activations {:.1}",
            gb(self.total()),
            gb(self.parameters),
            gb(self.gradients),
            gb(self.optimizer),
            gb(self.activations)
        )
    }
}

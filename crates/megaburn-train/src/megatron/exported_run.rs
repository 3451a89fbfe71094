//! A run that is written for Megatron-LM.

use megaburn_models::DecoderConfig;
use megaburn_optim::{Decay, LrSchedule, WeightDecaySchedule, WeightDecayStyle};
use megaburn_torch::{pickle::Tree, pt::PtFile};

use crate::{config::TrainConfig, error::TrainError, trainer::Progress};

/// Values of the arguments that are copied at most.
pub(super) const MOST_VALUES: usize = 1 << 20;

/// A run that is written for Megatron-LM.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) model: &'a DecoderConfig,
    pub(super) progress: Progress,
    /// The rows of the vocabulary, padding included.
    pub(super) padded_vocab: usize,
    /// The degree of expert parallelism. Above 1, Megatron-Core's experts have an optimizer of their
    /// own.
    pub(super) ep: usize,
    /// Whether the layers are those of Transformer Engine, as is Megatron-LM's default.
    pub(super) is_transformer_engine: bool,
    /// The `common.pt` of the checkpoint that the run began with.
    pub(super) original: Option<&'a PtFile>,
}

/// The schedules of a run, in samples.
pub(super) struct Rates {
    pub(super) lr: LrSchedule,
    pub(super) decoupled_lr: LrSchedule,
    pub(super) weight_decay: WeightDecaySchedule,
}

impl Run<'_> {
    pub(super) fn rates(&self) -> Result<Rates, TrainError> {
        let (train, optimizer) = (&self.config.train, &self.config.optimizer);
        let batches = train.batch_schedule()?;
        Ok(Rates {
            lr: optimizer.lr_schedule(train.steps, &batches),
            decoupled_lr: optimizer.decoupled_schedule(train.steps, &batches),
            weight_decay: optimizer.weight_decay_schedule(train.steps, &batches),
        })
    }

    /// A value of the original `common.pt`, if it can be copied.
    pub(super) fn copied(&self, name: &str) -> Option<Tree> {
        Tree::copy_of(self.original?.root().get(name)?, MOST_VALUES)
    }

    /// The samples of all updates, which schedules count.
    pub(super) fn num_samples(&self) -> u64 {
        self.progress.consumed_samples - self.progress.skipped_samples
    }
}

/// Megatron-LM's name of a decay.
pub(super) fn decay_style(decay: Decay) -> &'static str {
    match decay {
        Decay::Constant => "constant",
        Decay::Linear => "linear",
        Decay::Cosine => "cosine",
        Decay::InverseSquareRoot => "inverse-square-root",
        Decay::Wsd { .. } => "WSD",
    }
}

/// Megatron-LM's name of how weight decay changes.
pub(super) fn weight_decay_style(style: WeightDecayStyle) -> &'static str {
    match style {
        WeightDecayStyle::Linear => "linear",
        WeightDecayStyle::Cosine => "cosine",
    }
}

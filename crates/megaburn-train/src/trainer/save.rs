use std::collections::BTreeMap;

use megaburn_checkpoint::{Advance, AsyncSave};
use megaburn_optim::LossScaler;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    data::BlendRecord,
    error::TrainError,
    trainer::{Trainer, amax_histories::SavedAmaxes, precision_fallback::Fallbacks},
    trainer_core::{Progress, Record, Rollback},
};

/// The state in addition to the tensors that a run needs to continue as if uninterrupted. Learning
/// rates, batches and data are functions of these numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    pub(crate) progress: Progress,
    pub(crate) seed: u64,
    pub(crate) seq_len: usize,
    /// What identifies the samples. Only a checkpoint that was made from one of another program
    /// (`imported`) may be without it, because that one records nothing that could be compared.
    #[serde(default)]
    pub(crate) data_hash: Option<u64>,
    /// [`megaburn_data::Samples::order_hash`].
    #[serde(default = "no_order")]
    pub(crate) order_hash: Option<u64>,
    #[serde(default)]
    pub(crate) num_train_samples: Option<u64>,
    /// How the training data sets are mixed.
    #[serde(default)]
    pub(crate) blend: Option<BlendRecord>,
    /// The multiple that documents are padded to, if samples are split into documents.
    #[serde(default)]
    pub(crate) document_multiple: Option<usize>,
    /// The configuration that the run was trained with, with every key. Only used for comparison.
    #[serde(default)]
    pub(crate) config: Value,
    #[serde(default)]
    pub(crate) loss_scaler: Option<LossScaler>,
    #[serde(default = "adamw")]
    pub(crate) optimizer: String,
    /// For each layer, the fraction of the last step's tokens that each expert got.
    #[serde(default)]
    pub(crate) last_load: Vec<Option<Vec<f64>>>,
    /// With delayed scaling, the largest magnitudes of the steps before.
    #[serde(default, skip_serializing_if = "SavedAmaxes::is_empty")]
    pub(crate) amaxes: SavedAmaxes,
    /// With `precision.fallback`, the layers that fell back.
    #[serde(default, skip_serializing_if = "Fallbacks::is_empty")]
    pub(crate) fallbacks: Fallbacks,
    /// With `train.on_spike`, the losses of the last updates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) losses: Vec<f64>,
    /// With `train.on_spike = "rollback"`, the rollbacks so far.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) rollbacks: Vec<Rollback>,
    /// The validation losses so far, at each step, for `train.keep_best_checkpoints`.
    #[serde(default)]
    pub(crate) eval_losses: BTreeMap<u64, f64>,
    /// The program whose checkpoint the run was made from, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) imported: Option<ImportedFrom>,
}

/// A program whose checkpoints become runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ImportedFrom {
    /// Megatron-LM.
    Megatron,
}

/// The order of checkpoints from before there was a choice.
fn no_order() -> Option<u64> {
    Some(0)
}

/// The optimizer of checkpoints from before there was a choice.
fn adamw() -> String {
    "adamw".to_string()
}

impl Trainer {
    /// Writes a checkpoint of the current state into the folder of checkpoints, or into that of each
    /// host.
    ///
    /// The values that the optimizer updates are written: for bf16 and f16 parameters their f32
    /// masters, if they have any, and the optimizer state in its own types. Reading converts to
    /// wider types. So a run can continue from a checkpoint of other types; one that keeps fewer
    /// bits rounds what it reads.
    ///
    /// Each rank writes a share of what it holds; nothing is gathered, and one tensor at a time is
    /// copied to the host.
    ///
    /// # Errors
    /// Weights are not finite; any rank fails (the error is on every rank); another run has taken
    /// the folder. Older checkpoints are untouched.
    /// # Collective
    /// All ranks.
    pub fn save(&self) -> Result<(), TrainError> {
        self.core.save(self.checkpoint_record())
    }

    /// Starts to save the current state asynchronously. Threads of each rank write the rank's
    /// share while training continues; [`advance_save`](Self::advance_save) and
    /// [`finish_save`](Self::finish_save) complete the checkpoint.
    ///
    /// On GPUs the share is copied to pinned host memory while the next step computes; the next
    /// update waits for the copies. On CPUs the threads share the tensors, so the next update writes
    /// to new memory. What they hash and write is that memory itself, and they check that weights are
    /// finite.
    ///
    /// # Errors
    /// Any rank fails (the error is on every rank); another run has taken the folder.
    /// # Collective
    /// All ranks.
    pub fn begin_save(&mut self) -> Result<AsyncSave, TrainError> {
        let record = self.checkpoint_record();
        self.core.begin_save(record)
    }

    /// Begins the next stage of an asynchronous save, if the threads of all ranks have ended.
    ///
    /// # Errors
    /// As [`save`](Self::save). The save is over then.
    /// # Collective
    /// All ranks.
    pub fn advance_save(&self, save: &mut AsyncSave) -> Result<Advance, TrainError> {
        self.core.advance_save(save)
    }

    /// Waits until an asynchronous save is complete.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    /// # Collective
    /// All ranks.
    pub fn finish_save(&self, save: AsyncSave) -> Result<(), TrainError> {
        self.core.finish_save(save)
    }

    /// The contents of a checkpoint other than tensors.
    pub(super) fn checkpoint_record(&self) -> Record {
        Record {
            model: json!(self.model_config),
            trainer: serde_json::to_value(self.state()).expect("numbers are always serializable"),
        }
    }

    pub(super) fn state(&self) -> TrainerState {
        TrainerState {
            progress: self.core.progress,
            seed: self.core.config.run.seed,
            seq_len: self.core.config.data.seq_len,
            data_hash: Some(self.data.hash),
            order_hash: Some(self.samples.train.order_hash()),
            // A longer run of as many epochs has the same order.
            num_train_samples: Some(match self.core.config.data.is_of_fixed_length() {
                false => self.samples.train.num_samples(),
                true => 0,
            }),
            blend: self.samples.blend.clone(),
            document_multiple: self.core.config.data.split_into(),
            config: self
                .core
                .config
                .record(&self.core.groups.layout(), &self.model_config),
            loss_scaler: self.core.loss_scaler,
            optimizer: self.core.optimizer.name().to_string(),
            last_load: self.last_load.clone(),
            amaxes: self.amax_histories.saved(),
            fallbacks: self.precision.fallbacks.clone(),
            losses: self.core.losses.losses().collect(),
            rollbacks: self.core.rollbacks.clone(),
            eval_losses: self.core.eval_losses.clone(),
            imported: self.imported,
        }
    }
}

//! The section `[train]`.

use megaburn_data::{BatchSchedule, DataError, GlobalBatch};
use megaburn_kernels::AttentionKernel;
use megaburn_models::decoder::{Dropout, LossTerms};
use megaburn_optim::Dtype;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BatchRampConfig, OnSpike, TrainConfig, ineffective_keys::Condition, require::require};
use crate::error::TrainError;

/// `[train]`: batches, intervals, time limits and the number of steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct TrainingConfig {
    /// Optimizer steps of the full run, including those before a restart.
    #[schemars(extend("minimum" = 1))]
    pub steps: u64,
    /// Element type of parameters and activations: `f32`, `bf16` or `f16`. With `bf16` and `f16`
    /// the optimizer keeps f32 masters (see `optimizer.main_params_dtype`); with `f16` the loss is
    /// scaled (see `optimizer.loss_scale`).
    pub dtype: Dtype,
    /// Whether GPUs may round f32 matrices to tf32 (10 bits of mantissa) in GEMMs. Used with `dtype
    /// = "f32"`.
    pub tf32: bool,
    /// Whether GPUs time several algorithms for a GEMM when its shape first occurs. If not, they
    /// take the first one that cuBLASLt suggests, which is the same in every process.
    pub tune_products: bool,
    /// What computes attention: `auto`, `cubecl`, `cudnn` or `reference`.
    pub attention: AttentionKernel,
    /// Whether the loss computes the logits of a chunk of tokens at a time, and recomputes them in
    /// backward, instead of holding all of them.
    pub fused_linear_cross_entropy: bool,
    /// Dropout probability of what the embedding, attention and MLP add to the residual stream,
    /// from 0 to below 1.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1, "x-rule" = "at least 0 and below 1"))]
    pub hidden_dropout: f64,
    /// Dropout probability of the attention probabilities, from 0 to below 1. cuDNN's attention is
    /// not used with it.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1, "x-rule" = "at least 0 and below 1"))]
    pub attention_dropout: f64,
    /// Label smoothing of the loss in training: the share of the target's probability that is spread
    /// over the other tokens, from 0 to below 1. Evaluations report the loss without it.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1, "x-rule" = "at least 0 and below 1"))]
    pub label_smoothing: f64,
    /// Factor of the squared logarithm of the softmax's denominator, which is added to the loss of
    /// each token in training (PaLM uses 1e-4). Evaluations report the loss without it.
    #[schemars(extend("minimum" = 0))]
    pub z_loss: f64,
    /// Factor on the mean loss of the multi-token-prediction depths, which is added to the loss.
    /// Used with `model.mtp_layers` above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub mtp_loss_scaling_factor: f64,
    /// Samples of a step, over all ranks. It is a multiple of `micro_batch` times the data-parallel
    /// degree, unless `pad_batch` is set.
    #[schemars(extend("minimum" = 1))]
    pub global_batch: usize,
    /// Whether ranks that cannot split `global_batch` evenly also compute samples that do not count.
    /// Each rank computes the same number of micro-batches: with `micro_batch` 1, each of 3 ranks
    /// computes 3 of 8 samples, and one of these 9 does not count. Not for models of your own.
    pub pad_batch: bool,
    /// `[train.batch_ramp]`: how the batch grows to `global_batch` over the first steps. Default:
    /// no ramp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_ramp: Option<BatchRampConfig>,
    /// Samples that one rank computes at a time. Gradients of the micro-batches of a step are
    /// accumulated.
    #[schemars(extend("minimum" = 1))]
    pub micro_batch: usize,
    /// Steps between evaluations; 0 evaluates only at the end.
    pub eval_interval: u64,
    /// Number of global batches of an evaluation.
    #[schemars(extend("minimum" = 1))]
    pub eval_batches: usize,
    /// Steps between lines on the console; at least 1.
    #[schemars(extend("minimum" = 1))]
    pub log_interval: u64,
    /// Steps between checkpoints; 0 saves only at the end, when the run is stopped, and at the next
    /// key's interval.
    pub checkpoint_interval: u64,
    /// Minutes after the last checkpoint at which another is saved, at the end of the current step; 0
    /// is never.
    #[schemars(extend("minimum" = 0, "maximum" = 1_000_000))]
    pub checkpoint_interval_minutes: f64,
    /// Whether the checkpoints at intervals are written while training continues. Each rank copies
    /// what it writes to host memory, which it needs in addition until that is written. A save that
    /// is due while another is being written waits for it. If one fails, a warning says so and
    /// training continues with the older one. Default: training waits until a checkpoint is on disk.
    pub async_save: bool,
    /// Steps between comparisons of the weights, masters, moments and gradients that ranks hold copies
    /// of; 0 never compares. Ranks then compare before each checkpoint, too. The update after a
    /// comparison also finds weights, masters and moments of each rank that have changed since.
    pub check_replicas_interval: u64,
    /// Steps between comparisons of the time that ranks need for their own work, without waits. A rank
    /// that is slower than the others is named; 0 compares nothing.
    #[schemars(extend("minimum" = 0, "maximum" = 50))]
    pub straggler_interval: u64,
    /// Steps between reports of the health of GPUs: clocks, temperatures and errors, which a thread of
    /// each rank reads; 0 reads nothing.
    pub gpu_health_interval: u64,
    /// Whether a step whose loss or gradient is not finite is computed again, from the same weights
    /// and samples, before the run ends (not in f16, where the loss scale falls instead). If it is
    /// finite then, the hardware failed once: the run continues, and names the ranks whose loss was
    /// not finite.
    pub rerun_non_finite: bool,
    /// What follows a spike of the loss: one above `spike_factor` times the mean of the 16 updates
    /// before.
    pub on_spike: OnSpike,
    /// The bound of a spike, as a multiple of the mean loss.
    #[schemars(extend("exclusiveMinimum" = 1))]
    pub spike_factor: f64,
    /// Whether each step logs `num_zeros`, the number of zeros in its gradient.
    pub log_num_zeros: bool,
    /// Whether each step logs `params_norm`, the norm of all parameters after its update. The step
    /// then waits for the updated parameters instead of gathering them during the next step.
    pub log_params_norm: bool,
    /// Whether each step logs `max_attention_logit`, the largest attention logit of any head, which
    /// computes the products of queries and keys a second time. With `optimizer.qk_clip` it is
    /// always logged.
    pub log_max_attention_logit: bool,
    /// Number of checkpoints that are kept; older ones are removed, except those of the next two
    /// keys. Must be at least 2 if `check_replicas_interval` is not 0.
    #[schemars(extend("minimum" = 1))]
    pub keep_checkpoints: usize,
    /// Checkpoints whose step is a multiple of this number are always kept; 0 keeps none for that
    /// reason.
    pub keep_checkpoints_every: u64,
    /// Number of checkpoints that are kept because their validation loss is lowest: the first
    /// validation set's, evaluated at the step of the checkpoint.
    pub keep_best_checkpoints: usize,
    /// A folder of each host for checkpoints, such as one on a local disk, instead of `checkpoints`
    /// in `run.dir`. Each rank writes into the folder of its host, and `{host}` in the path stands
    /// for the name of the host. `run.dir` then needs to exist on rank 0's host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1))]
    pub local_checkpoint_dir: Option<String>,
    /// Number of other hosts that keep a copy of each file in `local_checkpoint_dir`, so that as
    /// many hosts may lose their folder.
    pub checkpoint_replicas: usize,
    /// URL of a folder in an object store, such as `s3://bucket/run`, to which each checkpoint is
    /// uploaded while training continues; empty for none. A start continues from the newest
    /// checkpoint there if it is newer than those in `run.dir`.
    pub checkpoint_store: String,
    /// Number of newest checkpoints that are kept in `checkpoint_store`, next to those of
    /// `keep_checkpoints_every` and `keep_best_checkpoints`; 0 keeps all.
    pub keep_stored_checkpoints: usize,
    /// Minutes after which the run saves and stops, at the end of the current step; 0 is never.
    #[schemars(extend("minimum" = 0))]
    pub exit_after_minutes: f64,
    /// Step after which the run saves and stops, even if it is before `steps`; 0 is never.
    pub exit_at_step: u64,
    /// Exit code of a run that was stopped by a signal or by one of the two keys above: 0, or from
    /// 5 to 125 and not 101.
    #[schemars(extend("maximum" = 125, "x-rule" = false))]
    pub stopped_exit_code: u8,
    /// Seconds that a rank waits in a collective for a rank that is in none of the phases below.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub timeout_seconds: f64,
    /// Seconds without progress that are allowed at the start: hosts waiting for each other,
    /// loading data, compiling kernels.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub start_timeout_seconds: f64,
    /// Seconds without progress that are allowed while a checkpoint is written.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub save_timeout_seconds: f64,
    /// Seconds without progress that are allowed while a checkpoint or a model is read or verified.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub load_timeout_seconds: f64,
    /// Seconds that reading the samples of a micro-batch may take.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub data_timeout_seconds: f64,
    /// Seconds without progress that are allowed in an evaluation.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub eval_timeout_seconds: f64,
    /// Seconds without a sign of life, outside collectives and the phases above, after which a
    /// rank's process is ended.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub step_timeout_seconds: f64,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            steps: 1200,
            dtype: Dtype::F32,
            tf32: false,
            tune_products: true,
            attention: AttentionKernel::Auto,
            fused_linear_cross_entropy: false,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            label_smoothing: 0.0,
            z_loss: 0.0,
            mtp_loss_scaling_factor: 0.1,
            global_batch: 8,
            pad_batch: false,
            batch_ramp: None,
            micro_batch: 2,
            eval_interval: 100,
            eval_batches: 4,
            log_interval: 10,
            checkpoint_interval: 200,
            checkpoint_interval_minutes: 0.0,
            async_save: false,
            check_replicas_interval: 0,
            straggler_interval: 10,
            gpu_health_interval: 100,
            rerun_non_finite: true,
            on_spike: OnSpike::None,
            spike_factor: 2.0,
            log_num_zeros: false,
            log_params_norm: false,
            log_max_attention_logit: false,
            keep_checkpoints: 2,
            keep_checkpoints_every: 0,
            keep_best_checkpoints: 0,
            local_checkpoint_dir: None,
            checkpoint_replicas: 1,
            checkpoint_store: String::new(),
            keep_stored_checkpoints: 0,
            exit_after_minutes: 0.0,
            exit_at_step: 0,
            stopped_exit_code: 0,
            timeout_seconds: 60.0,
            start_timeout_seconds: 600.0,
            save_timeout_seconds: 600.0,
            load_timeout_seconds: 600.0,
            data_timeout_seconds: 300.0,
            eval_timeout_seconds: 300.0,
            step_timeout_seconds: 3600.0,
        }
    }
}

impl TrainingConfig {
    /// The dropout probabilities of training.
    pub fn dropout(&self) -> Dropout {
        Dropout {
            hidden: self.hidden_dropout,
            attention: self.attention_dropout,
        }
    }

    /// What the loss adds to the cross-entropy in training.
    pub fn loss_terms(&self) -> LossTerms {
        LossTerms {
            label_smoothing: self.label_smoothing,
            z_loss: self.z_loss,
        }
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self, config: &TrainConfig) -> Vec<Condition> {
        vec![
            (
                "keep_stored_checkpoints",
                !self.checkpoint_store.is_empty(),
                "with train.checkpoint_store",
            ),
            (
                "keep_best_checkpoints",
                self.eval_interval > 0,
                "with train.eval_interval above 0",
            ),
            (
                "checkpoint_replicas",
                self.local_checkpoint_dir.is_some(),
                "with train.local_checkpoint_dir",
            ),
            (
                "async_save",
                self.checkpoint_interval > 0 || self.checkpoint_interval_minutes > 0.0,
                "with train.checkpoint_interval or train.checkpoint_interval_minutes above 0",
            ),
            (
                "tf32",
                self.dtype == Dtype::F32,
                "with train.dtype = \"f32\"",
            ),
            (
                "micro_batch",
                config.parallel.max_tokens_per_rank.is_none(),
                "without parallel.max_tokens_per_rank",
            ),
            (
                "spike_factor",
                self.on_spike != OnSpike::None,
                "with train.on_spike = \"skip\", \"stop\" or \"rollback\"",
            ),
            (
                "mtp_loss_scaling_factor",
                config.model.mtp_layers > 0,
                "with model.mtp_layers above 0",
            ),
        ]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        if let Some(ramp) = &self.batch_ramp {
            ramp.validate(self.global_batch)?;
        }
        self.num_micro_batches(1)?;
        self.validate_retention()?;
        self.validate_exits()
    }

    /// The number of samples of each step.
    ///
    /// # Errors
    /// The batch cannot grow from `start` to `global_batch` in steps of `increment`.
    pub fn batch_schedule(&self) -> Result<BatchSchedule, TrainError> {
        Ok(match self.batch_ramp {
            Some(BatchRampConfig {
                start,
                increment,
                samples,
            }) => BatchSchedule::ramp(start, increment, samples, self.global_batch)?,
            None => BatchSchedule::constant(self.global_batch)?,
        })
    }

    /// Micro-batches of a step on each of `dp` data-parallel ranks, once the batch ramp is over.
    ///
    /// # Errors
    /// Without [`pad_batch`](Self::pad_batch), the global batch, or the start or increment of its
    /// ramp, is not a multiple of `micro_batch * dp`. With it, a batch has fewer samples than a
    /// micro-batch.
    pub fn num_micro_batches(&self, dp: usize) -> Result<usize, TrainError> {
        let Self {
            global_batch,
            micro_batch,
            ..
        } = *self;
        let samples = micro_batch.saturating_mul(dp);
        let rule = match self.pad_batch {
            true => format!("at least train.micro_batch {micro_batch}"),
            false => format!("a multiple of train.micro_batch {micro_batch} x dp {dp} = {samples}"),
        };
        let fits = |batch: usize| {
            samples > 0 && (batch.is_multiple_of(samples) || self.pad_batch && batch >= micro_batch)
        };
        require(
            fits(global_batch),
            "train.global_batch",
            global_batch,
            rule.clone(),
        )?;
        if let Some(BatchRampConfig {
            start, increment, ..
        }) = self.batch_ramp
        {
            require(fits(start), "train.batch_ramp.start", start, rule.clone())?;
            require(
                fits(increment) || self.pad_batch,
                "train.batch_ramp.increment",
                increment,
                rule,
            )?;
        }
        Ok(global_batch.div_ceil(samples))
    }

    /// A step of `samples` samples on `dp` data-parallel ranks.
    ///
    /// # Errors
    /// As [`num_micro_batches`](Self::num_micro_batches).
    pub(crate) fn batch_of(&self, samples: usize, dp: usize) -> Result<GlobalBatch, DataError> {
        match self.pad_batch {
            true => GlobalBatch::padded(samples, self.micro_batch, dp),
            false => GlobalBatch::new(samples, self.micro_batch, dp),
        }
    }

    /// The distinct numbers of micro-batches that steps of a run have on each of `dp` data-parallel
    /// ranks.
    ///
    /// # Errors
    /// As [`num_micro_batches`](Self::num_micro_batches).
    pub(super) fn all_num_micro_batches(
        &self,
        dp: usize,
    ) -> Result<impl Iterator<Item = usize>, TrainError> {
        let last = self.num_micro_batches(dp)?;
        let samples = self.micro_batch * dp;
        let ramp = self.batch_ramp.as_ref();
        let (first, step) = ramp.map_or((last, 1), |ramp| {
            let first = ramp.start.div_ceil(samples);
            match self.pad_batch {
                true => (first, 1),
                false => (first, (ramp.increment / samples).max(1)),
            }
        });
        Ok((first..=last).step_by(step))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case("train.steps = 0", "`train.steps` is 0: it must be at least 1")]
    #[case(
        "train.global_batch = 0",
        "`train.global_batch` is 0: it must be at least 1"
    )]
    #[case(
        "train.micro_batch = 0",
        "`train.micro_batch` is 0: it must be at least 1"
    )]
    #[case(
        "train.micro_batch = 3",
        "`train.global_batch` is 8: it must be a multiple of train.micro_batch 3 x dp 1 = 3"
    )]
    #[case(
        "train.eval_batches = 0",
        "`train.eval_batches` is 0: it must be at least 1"
    )]
    #[case(
        "train.log_interval = 0",
        "`train.log_interval` is 0: it must be at least 1"
    )]
    #[case(
        "train.keep_checkpoints = 0",
        "`train.keep_checkpoints` is 0: it must be at least 1"
    )]
    fn a_value_that_no_run_can_use_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("s.toml", line);
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[rstest]
    #[case(32, 8, 2, 2)]
    #[case(8, 2, 2, 2)]
    #[case(15, 5, 1, 3)]
    fn the_global_batch_is_cut_into_micro_batches(
        #[case] global_batch: usize,
        #[case] micro_batch: usize,
        #[case] dp: usize,
        #[case] expected: usize,
    ) {
        let config = TrainingConfig {
            global_batch,
            micro_batch,
            ..TrainingConfig::default()
        };
        assert_eq!(config.num_micro_batches(dp).unwrap(), expected);
    }

    #[test]
    fn every_batch_of_a_ramp_must_be_cut_by_the_layout() {
        let layers = ConfigLayers::new()
            .with_set("train.batch_ramp.samples=100")
            .unwrap();
        let config = layers
            .with_set("train.micro_batch=1")
            .unwrap()
            .load()
            .unwrap();
        assert_eq!(config.train.num_micro_batches(4).unwrap(), 2);
        let error = config.train.num_micro_batches(8).unwrap_err().to_string();
        assert!(
            error.contains("`train.batch_ramp.start` is 4: it must be a multiple of"),
            "{error}"
        );
    }
}

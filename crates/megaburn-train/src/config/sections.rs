//! The sections that consist of little more than their fields.

use megaburn_kernels::AttentionKernel;
use megaburn_models::decoder::Dropout;
use megaburn_optim::Dtype;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    BatchRampConfig, TrainConfig,
    ineffective_keys::Condition,
    require::{fits_toml, require},
    tokenizer::Tokenizer,
};
use crate::{TrainError, device::DeviceChoice};

/// `[run]`: the folder of the run, its seed and its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct RunConfig {
    /// Folder of the run, for its resolved configuration, metrics, checkpoints and loss plot. A new
    /// run needs a folder that is absent or empty (see `allow_other_files`). Default:
    /// `runs/MODEL-DATA`, named after the model and the data.
    pub dir: String,
    /// Whether a new run may use a folder that holds other files. They are kept.
    pub allow_other_files: bool,
    /// Seed of the initial weights, the data order, dropout and the generated sample.
    pub seed: u64,
    /// What the ranks compute on: `auto`, `cpu` or `cuda`. `auto` uses GPUs if the program was
    /// built with feature `cuda` and there are any.
    pub device: DeviceChoice,
}

impl Default for RunConfig {
    fn default() -> Self {
        let dir = "runs/llama-821k-burn-sources".into();
        Self {
            dir,
            allow_other_files: false,
            seed: 1234,
            device: DeviceChoice::Auto,
        }
    }
}

impl RunConfig {
    pub(super) fn validate(&self) -> Result<(), TrainError> {
        require(
            !self.dir.is_empty(),
            "run.dir",
            "empty",
            "the path of a folder",
        )?;
        fits_toml("run.seed", self.seed).map(drop)
    }
}

/// `[data]`: the training data and its tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct DataConfig {
    /// The data: a text file, or JSON objects with their text in the field `text`, one per line
    /// (`.jsonl`, `.ndjson`, `.json`) or in one array (`.json`). The path is relative to the
    /// working directory. Default: the Rust sources of the Burn crates in the local Cargo registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Tokens of a sample. Default with `model.init`: the largest power of two up to the model's
    /// maximum and 2048.
    #[schemars(extend("minimum" = 1))]
    pub seq_len: usize,
    /// Whether samples are packed sequences: documents, which end with the tokenizer's eos, do not
    /// attend to each other and have their own positions. Each is padded to a multiple of
    /// `document_multiple`.
    pub documents: bool,
    /// The length of each document is padded to a multiple of this many tokens, which divides
    /// `seq_len`; with context parallelism it is a multiple of `2 * parallel.cp`. Used with
    /// `documents`.
    #[schemars(extend("minimum" = 1))]
    pub document_multiple: usize,
    /// Fraction of the data that is held out for evaluation, from 0 to below 1; 0 turns evaluation
    /// off.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1, "x-rule" = "at least 0 (no evaluation) and less than 1"))]
    pub validation_fraction: f64,
    /// The tokenizer: `byte`, or the path of a `tokenizer.json` or of a folder that holds one,
    /// relative to the working directory. Default with `model.init`: the model's own tokenizer, if
    /// it has one.
    pub tokenizer: Tokenizer,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            path: None,
            seq_len: 128,
            documents: false,
            document_multiple: 16,
            validation_fraction: 0.05,
            tokenizer: Tokenizer::Byte,
        }
    }
}

impl DataConfig {
    /// The multiple that documents are padded to, if samples are split into documents.
    pub(crate) fn split_into(&self) -> Option<usize> {
        self.documents.then_some(self.document_multiple)
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        vec![(
            "document_multiple",
            self.documents,
            "with data.documents = true",
        )]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        if let Some(path) = &self.path {
            require(!path.is_empty(), "data.path", "empty", "the path of a file")?;
        }
        self.tokenizer.validate()?;
        let Self {
            documents,
            document_multiple: multiple,
            seq_len,
            ..
        } = *self;
        if documents {
            let rule = format!("a divisor of data.seq_len {seq_len}");
            require(
                seq_len.is_multiple_of(multiple),
                "data.document_multiple",
                multiple,
                rule,
            )?;
        }
        Ok(())
    }
}

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
    /// Factor on the mean loss of the multi-token-prediction depths, which is added to the loss.
    /// Used with `model.mtp_layers` above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub mtp_loss_scaling_factor: f64,
    /// Samples of a step, over all ranks. It is a multiple of `micro_batch` times the data-parallel
    /// degree.
    #[schemars(extend("minimum" = 1))]
    pub global_batch: usize,
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
    /// Steps between checkpoints; 0 saves only at the end and when the run is stopped.
    pub checkpoint_interval: u64,
    /// Steps between comparisons of the weights that ranks hold copies of; 0 never compares.
    pub check_replicas_interval: u64,
    /// Whether each step logs `num_zeros`, the number of zeros in its gradient.
    pub log_num_zeros: bool,
    /// Whether each step logs `params_norm`, the norm of all parameters after its update. The step
    /// then waits for the updated parameters instead of gathering them during the next step.
    pub log_params_norm: bool,
    /// Number of checkpoints that are kept; older ones are removed.
    #[schemars(extend("minimum" = 1))]
    pub keep_checkpoints: usize,
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
            mtp_loss_scaling_factor: 0.1,
            global_batch: 8,
            batch_ramp: None,
            micro_batch: 2,
            eval_interval: 100,
            eval_batches: 4,
            log_interval: 10,
            checkpoint_interval: 200,
            check_replicas_interval: 0,
            log_num_zeros: false,
            log_params_norm: false,
            keep_checkpoints: 2,
            exit_after_minutes: 0.0,
            exit_at_step: 0,
            stopped_exit_code: 0,
            timeout_seconds: 60.0,
            start_timeout_seconds: 600.0,
            save_timeout_seconds: 600.0,
            load_timeout_seconds: 600.0,
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

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self, config: &TrainConfig) -> Vec<Condition> {
        vec![
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
        self.validate_exits()
    }
}

/// `[generate]`: the sample generated at the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct GenerateConfig {
    /// The text that the sample starts with. Default: `pub fn ` for the sources of Burn, else the
    /// first words of the evaluation data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Tokens to generate; 0 generates no sample.
    pub tokens: usize,
    /// Temperature of sampling: the logits are divided by it. 0 always takes the most likely token.
    #[schemars(extend("minimum" = 0))]
    pub temperature: f64,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            prompt: None,
            tokens: 200,
            temperature: 0.8,
        }
    }
}

impl GenerateConfig {
    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let ok = self.prompt.as_deref() != Some("") || self.tokens == 0;
        require(
            ok,
            "generate.prompt",
            "empty",
            "some text that a sample starts with",
        )
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{ConfigLayers, Exit};

    #[rstest]
    #[case(
        "run.dir = \"\"",
        "`run.dir` is empty: it must be the path of a folder"
    )]
    #[case(
        "data.path = \"\"",
        "`data.path` is empty: it must be the path of a file"
    )]
    #[case(
        "data.tokenizer = \"bpe\"",
        "`data.tokenizer` is bpe: it must be `byte`, or the path of a tokenizer.json or of a folder that contains one"
    )]
    #[case(
        "data.tokenizer = \"\"",
        "`data.tokenizer` is empty: it must be `byte`, or the path"
    )]
    #[case("data.seq_len = 0", "`data.seq_len` is 0: it must be at least 1")]
    #[case(
        "data.validation_fraction = -0.1",
        "is -0.1: it must be at least 0 (no evaluation)"
    )]
    #[case(
        "data.validation_fraction = 1.0",
        "is 1: it must be at least 0 (no evaluation) and less"
    )]
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
    #[case(
        "generate.prompt = \"\"",
        "`generate.prompt` is empty: it must be some text"
    )]
    #[case(
        "generate.temperature = -1",
        "`generate.temperature` is -1: it must be 0 or more and finite"
    )]
    fn a_value_that_no_run_can_use_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("s.toml", line);
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn a_seed_that_toml_cannot_hold_is_refused() {
        let run = RunConfig {
            seed: 1 << 63,
            ..RunConfig::default()
        };
        let error = run.validate().unwrap_err().to_string();
        assert!(
            error.starts_with("`run.seed` is 9223372036854775808: it must be at most"),
            "{error}"
        );
    }
}

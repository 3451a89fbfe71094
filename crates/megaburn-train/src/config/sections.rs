//! The sections that are little more than their fields.

use megaburn_models::decoder::Dropout;
use serde::{Deserialize, Serialize};

use super::{
    AttentionName, BatchRampConfig, Dtype,
    rules::{at_least_one, fits_toml, not_negative, positive, require},
    tokenizer::Tokenizer,
};
use crate::{TrainError, device::DeviceChoice};

/// `[run]`: where the run lives, its seed and its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Folder of the run: resolved configuration, metrics, checkpoints, loss picture. A new run takes one
    /// that is absent or empty. Where no layer of the configuration names one it is named after model and
    /// data, as the default is.
    pub dir: String,
    /// Whether a new run may begin in a folder that holds other files. They are kept.
    pub allow_other_files: bool,
    /// What initial weights and the order of the data are drawn from.
    pub seed: u64,
    /// What the ranks compute on: `auto`, `cpu` or `cuda`.
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

/// `[data]`: what is learnt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// A file of text or of JSON (`.jsonl`, `.ndjson`, `.json`), relative to the working directory.
    /// Default: the Rust sources of the Burn crates in the local Cargo registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Tokens of a sample.
    pub seq_len: usize,
    /// Whether documents, which the tokenizer's eos ends, do not see each other and have positions of
    /// their own.
    pub documents: bool,
    /// What each is padded to a multiple of.
    pub document_multiple: usize,
    /// Part of the data that is only evaluated on; 0 evaluates nothing.
    pub validation_fraction: f64,
    /// How text becomes tokens: `byte`, or the path of a `tokenizer.json` or of a folder that holds
    /// one, relative to the working directory.
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
    /// What documents are padded to a multiple of, where samples are split into such.
    pub(crate) fn split_into(&self) -> Option<usize> {
        self.documents.then_some(self.document_multiple)
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        if let Some(path) = &self.path {
            require(!path.is_empty(), "data.path", "empty", "the path of a file")?;
        }
        self.tokenizer.validate()?;
        at_least_one("data.seq_len", self.seq_len)?;
        let Self {
            documents,
            document_multiple: multiple,
            seq_len,
            ..
        } = *self;
        at_least_one("data.document_multiple", multiple)?;
        if documents {
            let rule = format!("a divisor of data.seq_len {seq_len}");
            require(
                seq_len.is_multiple_of(multiple),
                "data.document_multiple",
                multiple,
                rule,
            )?;
        }
        let fraction = self.validation_fraction;
        let ok = (0.0..1.0).contains(&fraction);
        require(
            ok,
            "data.validation_fraction",
            fraction,
            "at least 0 (no evaluation) and less than 1",
        )
    }
}

/// `[train]`: batches, intervals and the number of steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// Optimizer steps of the whole run, those before a restart included.
    pub steps: u64,
    /// Element type of parameters and activations.
    pub dtype: Dtype,
    /// Whether GPUs may round f32 matrices to tf32 (ten bits of mantissa) when they multiply them.
    pub tf32: bool,
    /// Whether GPUs time several algorithms for a matrix product when its shape first occurs; if not, they take the first
    /// that cuBLASLt suggests, the same in every process.
    pub tune_products: bool,
    /// How attention is computed.
    pub attention: AttentionName,
    /// Whether the loss computes the logits of some tokens at a time, and once more backward,
    /// instead of holding all of them.
    pub fused_linear_cross_entropy: bool,
    /// Share of what embedding, attention and MLP put into the residual stream that is dropped.
    pub hidden_dropout: f64,
    /// Share of attention's probabilities that is dropped.
    pub attention_dropout: f64,
    /// What the mean of the losses of further tokens is multiplied with before it is added to the loss, where
    /// model.mtp_layers is above 0.
    pub mtp_loss_scaling_factor: f64,
    /// Samples of a step, over all ranks.
    pub global_batch: usize,
    /// `[train.batch_ramp]`: how the first steps grow to as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_ramp: Option<BatchRampConfig>,
    /// Samples that one rank computes at a time; gradients of several are summed.
    pub micro_batch: usize,
    /// Steps between evaluations; 0 evaluates only at the end.
    pub eval_interval: u64,
    /// Global batches of an evaluation.
    pub eval_batches: usize,
    /// Steps between lines on the console.
    pub log_interval: u64,
    /// Steps between checkpoints; 0 saves only at the end and when stopped.
    pub checkpoint_interval: u64,
    /// Steps between comparisons of what ranks hold copies of; 0 compares never.
    pub check_replicas_interval: u64,
    /// Whether steps count the elements of their gradient that are zero, as `num_zeros`.
    pub log_num_zeros: bool,
    /// Whether steps compute the norm of all parameters behind their update, as `params_norm`. They are
    /// waited for then, not gathered while the next step computes.
    pub log_params_norm: bool,
    /// The last checkpoints that are kept.
    pub keep_checkpoints: usize,
    /// Minutes after which the run saves and stops, behind the step that is going on; 0 never stops it.
    pub exit_after_minutes: f64,
    /// The step after which the run saves and stops, though `steps` are not reached; 0 stops at none.
    pub exit_at_step: u64,
    /// What the process exits with when a signal or one of the two keys above stopped the run.
    pub stopped_exit_code: u8,
    /// Seconds that a rank waits in a collective for another that does nothing long.
    pub timeout_seconds: f64,
    /// Seconds that hosts wait for each other at the start, and that a rank may take to load data or
    /// compile kernels without progress.
    pub start_timeout_seconds: f64,
    /// Seconds that writing a checkpoint may make no progress.
    pub save_timeout_seconds: f64,
    /// Seconds that reading or verifying a checkpoint or a model may make no progress.
    pub load_timeout_seconds: f64,
    /// Seconds that a rank may give no sign of life outside collectives and the phases above: its
    /// process is ended then.
    pub step_timeout_seconds: f64,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            steps: 1200,
            dtype: Dtype::F32,
            tf32: false,
            tune_products: true,
            attention: AttentionName::Auto,
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
    /// What training drops.
    pub fn dropout(&self) -> Dropout {
        Dropout {
            hidden: self.hidden_dropout,
            attention: self.attention_dropout,
        }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        for (key, share) in [
            ("train.hidden_dropout", self.hidden_dropout),
            ("train.attention_dropout", self.attention_dropout),
        ] {
            require(
                (0.0..1.0).contains(&share),
                key,
                share,
                "at least 0 and below 1",
            )?;
        }
        positive(
            "train.mtp_loss_scaling_factor",
            self.mtp_loss_scaling_factor,
        )?;
        require(self.steps >= 1, "train.steps", self.steps, "at least 1")?;
        at_least_one("train.global_batch", self.global_batch)?;
        at_least_one("train.micro_batch", self.micro_batch)?;
        if let Some(ramp) = &self.batch_ramp {
            ramp.validate(self.global_batch)?;
        }
        self.num_micro_batches(1)?;
        at_least_one("train.eval_batches", self.eval_batches)?;
        require(
            self.log_interval >= 1,
            "train.log_interval",
            self.log_interval,
            "at least 1",
        )?;
        at_least_one("train.keep_checkpoints", self.keep_checkpoints)?;
        self.validate_exits()?;
        self.validate_limits()
    }
}

/// `[generate]`: the sample written at the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateConfig {
    /// What the sample starts with. Default: `pub fn ` where the run trains on the sources of Burn, else
    /// the first words of the data that is evaluated on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Tokens to generate; 0 writes no sample.
    pub tokens: usize,
    /// How far from the most likely token the choice may stray; 0 always takes the most likely.
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
            "some text for a sample to start with",
        )?;
        not_negative("generate.temperature", self.temperature)
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
        "`data.tokenizer` is bpe: it must be `byte`, or the path of a tokenizer.json or of a folder that holds one"
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

//! The sections that consist of little more than their fields.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::{fits_toml, require};
use crate::{device::DeviceChoice, error::TrainError};

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
    use crate::{config::ConfigLayers, exit::Exit};

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

//! The sections that consist of little more than their fields.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    data_order::DataOrder,
    ineffective_keys::Condition,
    require::{fits_toml, require},
    sources::{SourceConfig, TRAIN, validate_sources},
    tokenizer::Tokenizer,
};
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

/// `[data]`: the training data and its tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct DataConfig {
    /// The data: a data set in Megatron-LM's format (`PREFIX` of `PREFIX.bin` and `PREFIX.idx`, see
    /// `megaburn data preprocess`), a text file, or JSON objects with their text in the field
    /// `text`, one per line
    /// (`.jsonl`, `.ndjson`, `.json`) or in one array (`.json`). The path is relative to the
    /// working directory. Default: the Rust sources of the Burn crates in the local Cargo registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Training data sets that are mixed by weight, in place of `path`. Each is a table with `path`
    /// and, if any has one, `weight`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub train: Vec<SourceConfig>,
    /// Data sets to evaluate on, in place of a part of the training data. Each has an evaluation of
    /// its own; those with the same `name` are mixed. The first one is the validation loss of the
    /// run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub valid: Vec<SourceConfig>,
    /// Data sets to evaluate on at the end of the run, as `valid`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub test: Vec<SourceConfig>,
    /// Divides each training data set between its sequences by up to three weights: training,
    /// validation, test, like `969,30,1`. The rounding is that of Megatron-LM. Data sets must be in
    /// Megatron-LM's format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// The order of the training samples.
    pub order: DataOrder,
    /// The folder of what is computed from data sets once per host. Text files are encoded into it
    /// for all later runs: all of them if this key is set, otherwise those that are compressed and
    /// JSON files above 16 MiB. Default: `$XDG_CACHE_HOME/megaburn` or `~/.cache/megaburn`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_dir: Option<String>,
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
    /// Whether the label after an end of a document, which is the first token of the next one, is
    /// excluded from the loss. Used without `documents`, where it is no label.
    pub eod_mask_loss: bool,
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
            train: Vec::new(),
            valid: Vec::new(),
            test: Vec::new(),
            split: None,
            order: DataOrder::default(),
            cache_dir: None,
            seq_len: 128,
            documents: false,
            document_multiple: 16,
            eod_mask_loss: false,
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
        vec![
            (
                "document_multiple",
                self.documents,
                "with data.documents = true",
            ),
            ("eod_mask_loss", !self.documents, "without data.documents"),
            (
                "validation_fraction",
                self.cuts_tokens(),
                "without data.valid and data.split",
            ),
        ]
    }

    /// Whether `validation_fraction` decides which data is held out.
    fn cuts_tokens(&self) -> bool {
        self.valid.is_empty() && self.split.is_none()
    }

    /// Whether there is data for evaluations during training.
    pub(super) fn evaluates(&self) -> bool {
        let split = self.split().ok().flatten();
        let weight = split.and_then(|weights| weights.get(1).copied());
        match weight {
            _ if !self.valid.is_empty() => true,
            Some(weight) => weight > 0.0,
            None => self.split.is_none() && self.validation_fraction > 0.0,
        }
    }

    /// The weights of `split`.
    ///
    /// # Errors
    /// It is not a list of up to three numbers.
    pub(crate) fn split(&self) -> Result<Option<Vec<f64>>, TrainError> {
        let Some(split) = &self.split else {
            return Ok(None);
        };
        let weights = split.split(',').map(|weight| weight.trim().parse().ok());
        let weights: Option<Vec<f64>> = weights.collect();
        let rule = "up to three numbers separated by commas, like 969,30,1";
        let weights = weights.filter(|weights| weights.len() <= 3);
        require(weights.is_some(), "data.split", split, rule)?;
        let part = |index| weights.as_ref().and_then(|weights| weights.get(index));
        let trains = part(0).is_some_and(|weight| *weight > 0.0);
        require(
            trains,
            "data.split",
            split,
            "weights of which the first is above 0",
        )?;
        for (index, key, list) in [(1, "data.valid", &self.valid), (2, "data.test", &self.test)] {
            let is_twice = part(index).is_some_and(|weight| *weight > 0.0) && !list.is_empty();
            let rule = "a list without data.split, or with weight 0 there";
            require(!is_twice, key, "a list", rule)?;
        }
        Ok(weights)
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        if let Some(path) = &self.path {
            require(!path.is_empty(), "data.path", "empty", "the path of a file")?;
            let rule = "empty if --data or data.path is set: move that data set into the list, or \
                drop the list with --set 'data.train=[]'";
            require(self.train.is_empty(), TRAIN, "a list", rule)?;
        }
        let lists = [
            (TRAIN, &self.train),
            ("data.valid", &self.valid),
            ("data.test", &self.test),
        ];
        for (key, sources) in lists {
            validate_sources(key, sources)?;
        }
        if let Some(folder) = &self.cache_dir {
            let rule = "the path of a folder";
            require(!folder.is_empty(), "data.cache_dir", "empty", rule)?;
        }
        self.split()?;
        let is_both = |name: &String| self.test.iter().any(|test| test.name() == *name);
        let both = self.valid.iter().map(SourceConfig::name).find(is_both);
        let value = format!("a list with {}", both.as_deref().unwrap_or_default());
        let rule = "a list with other names than data.valid; set `name`";
        require(both.is_none(), "data.test", value, rule)?;
        let holds_out = self.validation_fraction > 0.0 && self.cuts_tokens();
        let rule = "`megaburn` with data.validation_fraction, which cuts documents; set data.split, \
            like 95,5, or data.valid";
        require(
            self.order == DataOrder::Megaburn || !holds_out,
            "data.order",
            "megatron",
            rule,
        )?;
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

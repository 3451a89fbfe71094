//! `[data]`: the training data and its tokenizer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    data_order::DataOrder,
    dataset::DatasetKind,
    fim::FimConfig,
    ineffective_keys::Condition,
    masking::DataMaskingConfig,
    packing::Packing,
    require::require,
    sources::{SourceConfig, TRAIN, parse_split, validate_sources},
    tokenizer::Tokenizer,
};
use crate::error::TrainError;

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
    /// Training data sets that are mixed, in place of `path`. Each is a table with `path` and, if any
    /// has one, `weight` or `epochs`.
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
    /// What samples are made of the data: `gpt`, `bert` for encoders, or `t5` for encoder-decoder
    /// models. Default: the one that `model.family` can learn from.
    pub dataset: DatasetKind,
    /// The order of the training samples. Those of `data.dataset = "bert"` and `"t5"` have that of
    /// Megatron-LM.
    pub order: DataOrder,
    /// The folder of what is computed from data sets once per host. Text files are encoded into it
    /// for all later runs: all of them if this key is set, otherwise those that are compressed or
    /// above 16 MiB. Default: `$XDG_CACHE_HOME/megaburn` or `~/.cache/megaburn`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_dir: Option<String>,
    /// Threads of each rank that read the samples of the next step while one is computed; 0 reads
    /// samples when they are needed. Default: 8 if a training data set is read from a URL, else 0,
    /// because reads from a local disk take microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_workers: Option<usize>,
    /// Tokens of a sample; with `data.dataset = "t5"` those of the encoder. Default with
    /// `model.init`: the largest power of two up to the model's maximum and 2048.
    #[schemars(extend("minimum" = 1))]
    pub seq_len: usize,
    /// Tokens of the decoder in a sample of `data.dataset = "t5"` (Megatron-LM's
    /// `--decoder-seq-length`). A sample whose masked spans need more is an error.
    #[schemars(extend("minimum" = 2))]
    pub decoder_seq_len: usize,
    /// Whether samples are packed sequences: documents, which end with the tokenizer's eos, do not
    /// attend to each other and have their own positions. Each is padded to a multiple of
    /// `document_multiple`.
    pub documents: bool,
    /// The length of each document is padded to a multiple of this many tokens, which divides
    /// `seq_len`; with context parallelism it is a multiple of `2 * parallel.cp`. Used with
    /// `documents`.
    #[schemars(extend("minimum" = 1))]
    pub document_multiple: usize,
    /// How documents are put into samples. `best_fit` needs `documents`.
    pub packing: Packing,
    /// Whether the label after an end of a document, which is the first token of the next one, is
    /// excluded from the loss. Used without `documents`, where it is no label.
    pub eod_mask_loss: bool,
    /// Fraction of the data that is held out for evaluation, from 0 to below 1; 0 turns evaluation
    /// off. With `data.dataset = "bert"` or `"t5"` it is a fraction of the documents.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1, "x-rule" = "at least 0 (no evaluation) and less than 1"))]
    pub validation_fraction: f64,
    /// The probability that a sample of `data.dataset = "bert"` or `"t5"` is cut to a random length
    /// (Megatron-LM's `--short-seq-prob`).
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub short_sequence_probability: f64,
    /// `[data.masking]`: which tokens are masked, with `data.dataset = "bert"` or `"t5"`. Default: as
    /// Megatron-LM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masking: Option<DataMaskingConfig>,
    /// `[data.fim]`: fill-in-the-middle. Default: documents are read as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fim: Option<FimConfig>,
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
            dataset: DatasetKind::default(),
            order: DataOrder::default(),
            cache_dir: None,
            num_workers: None,
            seq_len: 128,
            decoder_seq_len: 128,
            documents: false,
            document_multiple: 16,
            packing: Packing::None,
            eod_mask_loss: false,
            validation_fraction: 0.05,
            short_sequence_probability: 0.1,
            masking: None,
            fim: None,
            tokenizer: Tokenizer::Byte,
        }
    }
}

impl DataConfig {
    /// The multiple that documents are padded to, if samples are split into documents.
    pub(crate) fn split_into(&self) -> Option<usize> {
        self.documents.then_some(self.document_multiple)
    }

    /// Fill-in-the-middle, if documents are transformed.
    pub(crate) fn active_fim(&self) -> Option<&FimConfig> {
        self.fim.as_ref().filter(|fim| fim.rate > 0.0)
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
                "short_sequence_probability masking",
                self.dataset.is_masked(),
                "with data.dataset = \"bert\" or \"t5\"",
            ),
            (
                "decoder_seq_len",
                self.dataset == DatasetKind::T5,
                "with data.dataset = \"t5\"",
            ),
            (
                "order",
                self.dataset == DatasetKind::Gpt,
                "with data.dataset = \"gpt\"",
            ),
            (
                "validation_fraction",
                self.cuts_tokens(),
                "without data.valid and data.split",
            ),
        ]
    }

    /// Whether `validation_fraction` decides which data is held out.
    fn cuts_tokens(&self) -> bool {
        let splits_each = !self.train.is_empty() && self.train.iter().all(|of| of.split.is_some());
        self.valid.is_empty() && self.split.is_none() && !splits_each
    }

    /// Whether there is data for evaluations during training.
    pub(super) fn evaluates(&self) -> bool {
        let holds_out = self.validation_fraction > 0.0 && self.cuts_tokens();
        !self.valid.is_empty() || holds_out || self.splits_off(1)
    }

    /// Whether a split gives data to part `index`: training, validation or test.
    fn splits_off(&self, index: usize) -> bool {
        let splits = self.train.iter().map(|source| self.split_of(Some(source)));
        let has_own = |source: &SourceConfig| source.split.is_some();
        let is_unused = !self.train.is_empty() && self.train.iter().all(has_own);
        let all = splits.chain((!is_unused).then(|| self.split_of(None)));
        let weight = |split: Option<Vec<f64>>| split?.get(index).copied();
        all.filter_map(Result::ok)
            .filter_map(weight)
            .any(|weight| weight > 0.0)
    }

    /// The weights by which a data set of `train`, or that of `path`, is divided.
    ///
    /// # Errors
    /// They are not up to three numbers of which the first is positive.
    pub(crate) fn split_of(
        &self,
        source: Option<&SourceConfig>,
    ) -> Result<Option<Vec<f64>>, TrainError> {
        let own = source.and_then(|source| source.split.as_ref());
        let split = own.or(self.split.as_ref());
        split
            .map(|split| parse_split("data.split", split, split))
            .transpose()
    }

    /// The weights by which the documents of a data set are divided into training, validation and
    /// test; `None` if nothing is held out.
    ///
    /// # Errors
    /// As [`split_of`](Self::split_of).
    pub(crate) fn document_weights(
        &self,
        source: Option<&SourceConfig>,
    ) -> Result<Option<Vec<f64>>, TrainError> {
        let held_out = self.validation_fraction;
        let holds_out = held_out > 0.0 && self.valid.is_empty();
        Ok(self
            .split_of(source)?
            .or(holds_out.then(|| vec![1.0 - held_out, held_out])))
    }

    /// Whether the training samples are as many as the steps of the run need, in an order that
    /// depends on their number.
    pub(crate) fn is_of_fixed_length(&self) -> bool {
        self.order == DataOrder::Megatron || self.dataset.is_masked()
    }

    /// The lengths of the sequences of a sample.
    pub fn seq_lens(&self) -> Vec<usize> {
        match self.dataset {
            DatasetKind::Gpt | DatasetKind::Bert => vec![self.seq_len],
            DatasetKind::T5 => vec![self.seq_len, self.decoder_seq_len],
        }
    }

    /// The length of the longest sequence of a sample, for which a fresh model is made.
    pub fn longest_seq_len(&self) -> usize {
        self.seq_lens().into_iter().max().unwrap_or_default()
    }

    /// The length of the labels of a sample.
    pub(crate) fn label_len(&self) -> usize {
        match self.dataset {
            DatasetKind::Gpt | DatasetKind::Bert => self.seq_len,
            DatasetKind::T5 => self.decoder_seq_len,
        }
    }

    /// The masking of samples.
    pub(crate) fn masking(&self) -> DataMaskingConfig {
        let default = || self.dataset.default_masking();
        self.masking.clone().unwrap_or_else(default)
    }

    /// Refuses keys that masked sentences do not have.
    fn check_masked(&self) -> Result<(), TrainError> {
        let dataset = self.dataset;
        let is_masked = dataset.is_masked();
        let unlike = [
            ("data.documents", self.documents),
            ("data.eod_mask_loss", self.eod_mask_loss),
            ("data.fim", self.active_fim().is_some()),
        ];
        for (key, is_set) in unlike {
            let rule = format!(
                "absent with data.dataset = \"{dataset}\", whose samples are whole sentences"
            );
            require(!(is_masked && is_set), key, "set", rule)?;
        }
        let has_epochs = self.train.iter().any(|source| source.epochs.is_some());
        let rule = format!(
            "a list with weights instead of epochs, which data.dataset = \"{dataset}\" lacks"
        );
        require(
            !(is_masked && has_epochs),
            TRAIN,
            "a list with epochs",
            rule,
        )
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
        let num_workers = self.num_workers.unwrap_or_default();
        let rule = "at most 256";
        require(num_workers <= 256, "data.num_workers", num_workers, rule)?;
        self.split_of(None)?;
        let rule = "a list without data.split, or with weight 0 there";
        let is_twice = |index, list: &[SourceConfig]| self.splits_off(index) && !list.is_empty();
        require(!is_twice(1, &self.valid), "data.valid", "a list", rule)?;
        require(!is_twice(2, &self.test), "data.test", "a list", rule)?;
        let is_test = self.valid.iter().any(|source| source.name() == TEST);
        let value = "a list with test, which is the name of the part that data.split holds out";
        let rule = "a list with other names; set `name`";
        require(!is_test || !self.splits_off(2), "data.valid", value, rule)?;
        let is_both = |name: &String| self.test.iter().any(|test| test.name() == *name);
        let both = self.valid.iter().map(SourceConfig::name).find(is_both);
        let value = format!("a list with {}", both.as_deref().unwrap_or_default());
        let rule = "a list with other names than data.valid; set `name`";
        require(both.is_none(), "data.test", value, rule)?;
        let has_epochs = self.train.iter().any(|source| source.epochs.is_some());
        self.check_masked()?;
        let is_megatron = self.order == DataOrder::Megatron && self.dataset == DatasetKind::Gpt;
        let rule = "a list with weights instead of epochs, which data.order = \"megatron\" lacks";
        require(
            !is_megatron || !has_epochs,
            TRAIN,
            "a list with epochs",
            rule,
        )?;
        let holds_out = self.validation_fraction > 0.0 && self.cuts_tokens();
        let rule = "`megaburn` with data.validation_fraction, which cuts documents; set data.split, \
            like 95,5, or data.valid";
        require(!is_megatron || !holds_out, "data.order", "megatron", rule)?;
        if self.packing == Packing::BestFit {
            let rule = "`none` without data.documents = true, which keeps documents apart";
            require(self.documents, "data.packing", "best_fit", rule)?;
            let rule = "`none` with data.order = \"megatron\", which joins documents";
            require(!is_megatron, "data.packing", "best_fit", rule)?;
        }
        self.fim.as_ref().map_or(Ok(()), FimConfig::validate)?;
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

/// The name of the evaluation on what `data.split` holds out for test.
pub(crate) const TEST: &str = "test";

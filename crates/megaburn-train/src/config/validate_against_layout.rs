//! Checks that a configuration can train a model on the data, before anything is written.

use megaburn_mesh::{Layout, ModelShape};
use megaburn_models::DecoderConfig;

use super::{DatasetKind, InitFrom, TrainConfig, require};
use crate::{data::RunData, error::TrainError};

impl TrainConfig {
    /// Checks that the model, the sequence and the batch can be split over a layout. A model that
    /// is read from `model.init` is checked entirely when it is opened.
    pub(super) fn validate_for(&self, layout: &Layout) -> Result<(), TrainError> {
        self.check_layout(layout, |seq_len| self.model.shape(seq_len))?;
        match self.model.init {
            None => self.check_model(layout, &self.fresh_model(1)),
            Some(_) => self.check_mtp(self.model.mtp_layers),
        }
    }

    /// Refuses a model that cannot be trained on `layout` with this configuration.
    ///
    /// # Errors
    /// The first problem; the error names its key.
    pub(crate) fn check_model(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<(), TrainError> {
        for seq_len in self.data.seq_lens() {
            model.check_seq_len(seq_len)?;
        }
        model.check_context_parallel(layout.cp)?;
        self.check_layout(layout, |seq_len| model.shape(seq_len))?;
        self.context_comms(layout, model)?;
        self.check_documents(layout, model)?;
        self.check_experts(model)?;
        self.check_mtp(model.mtp_layers)?;
        self.parallel.pipelines(layout, model.layers, &self.train)
    }

    /// The model of a run that starts from random weights, for `vocab` token ids.
    pub(crate) fn fresh_model(&self, vocab: usize) -> DecoderConfig {
        self.model.decoder(self.data.longest_seq_len(), vocab)
    }

    /// Refuses a layout that does not split the sequences, the batch or a model, whose `shape` is
    /// that for sequences of a length.
    fn check_layout(
        &self,
        layout: &Layout,
        shape: impl Fn(usize) -> ModelShape,
    ) -> Result<(), TrainError> {
        for seq_len in self.data.seq_lens() {
            let seq_len = self.padded(seq_len, layout);
            self.cutting(layout).validate_for(&shape(seq_len))?;
        }
        self.parallel.shares(layout)?;
        self.check_context(layout)?;
        self.train.num_micro_batches(layout.dp).map(drop)
    }

    /// Checks the model that the run starts from, or the fresh one, as
    /// [`check_model`](Self::check_model) does, and that it can read the data. Returns the model's
    /// configuration.
    ///
    /// # Errors
    /// As [`check_model`](Self::check_model); also a vocabulary smaller than the tokenizer's, or
    /// less data than one sample.
    pub(crate) fn check_start(
        &self,
        layout: &Layout,
        start: Option<&InitFrom>,
        data: &RunData,
    ) -> Result<DecoderConfig, TrainError> {
        let model = match start {
            Some(start) => start.source().config().clone(),
            None => self.fresh_model(data.vocab()),
        };
        self.check_model(layout, &model)?;
        let tokenizer = String::from(self.data.tokenizer.clone());
        let remedy = match start {
            Some(_) => "set data.tokenizer to the model's tokenizer",
            None => "remove model.vocab, or choose a smaller data.tokenizer",
        };
        let vocab = data.vocab();
        let rule =
            format!("at least the {vocab} token ids of data.tokenizer = \"{tokenizer}\": {remedy}");
        require(model.vocab >= vocab, "model.vocab", model.vocab, rule)?;
        self.check_dataset(&model)?;
        data.samples(self)?;
        Ok(model)
    }

    /// Refuses a model that cannot learn from the samples of `data.dataset`.
    fn check_dataset(&self, model: &DecoderConfig) -> Result<(), TrainError> {
        let dataset = self.data.dataset;
        let learns_from = DatasetKind::of(model);
        let why = match (dataset, learns_from) {
            (DatasetKind::Bert, DatasetKind::Bert) => {
                let rule = "0, or at least 2: a sample has two segments";
                let types = model.token_types;
                return require(types != 1, "model.parts.token_types", types, rule);
            }
            (DatasetKind::Gpt, DatasetKind::Gpt) | (DatasetKind::T5, DatasetKind::T5) => {
                return Ok(());
            }
            (DatasetKind::Gpt, DatasetKind::Bert) => {
                "the model sees later tokens (model.parts.bidirectional), so that it would read the \
                next token instead of predicting it"
            }
            (DatasetKind::Gpt | DatasetKind::Bert, DatasetKind::T5) => {
                "the model has an encoder and a decoder (model.encoder_layers), which read a sequence \
                each"
            }
            (DatasetKind::Bert, DatasetKind::Gpt) => {
                "the model is a decoder; choose model.family = \"bert\", or \
                model.parts.bidirectional = true"
            }
            (DatasetKind::T5, DatasetKind::Gpt | DatasetKind::Bert) => {
                "the model has no decoder that reads the output of an encoder; choose \
                model.family = \"t5\", or set model.encoder_layers"
            }
        };
        let rule = format!("\"{learns_from}\": {why}");
        require(false, "data.dataset", dataset, rule)
    }
}

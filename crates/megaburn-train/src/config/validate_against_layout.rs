//! Checks that a configuration can train a model on the data, before anything is written.

use megaburn_mesh::{Layout, ModelShape};
use megaburn_models::DecoderConfig;

use super::{DatasetKind, InitFrom, TrainConfig, require};
use crate::{data::RunData, error::TrainError};

impl TrainConfig {
    /// Checks that the model, the sequence and the batch can be split over a layout. A model that
    /// is read from `model.init` is checked entirely when it is opened.
    pub(super) fn validate_for(&self, layout: &Layout) -> Result<(), TrainError> {
        self.check_layout(layout, &self.model.shape(self.padded_seq_len(layout)))?;
        match self.model.init {
            None => self.check_model(layout, &self.model.decoder(self.data.seq_len, 1)),
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
        model.check_seq_len(self.data.seq_len)?;
        model.check_context_parallel(layout.cp)?;
        self.check_layout(layout, &model.shape(self.padded_seq_len(layout)))?;
        self.context_comms(layout, model)?;
        self.check_documents(layout, model)?;
        self.check_experts(model)?;
        self.check_mtp(model.mtp_layers)?;
        self.parallel.pipelines(layout, model.layers, &self.train)
    }

    /// Refuses a layout that does not split a model of this shape, the sequence or the batch.
    fn check_layout(&self, layout: &Layout, model: &ModelShape) -> Result<(), TrainError> {
        self.cutting(layout).validate_for(model)?;
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
            None => self.model.decoder(self.data.seq_len, data.vocab()),
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
        let dataset = &self.data.dataset;
        match dataset {
            DatasetKind::Gpt => {
                let rule = "\"bert\": the model sees later tokens (model.parts.bidirectional), so \
                    that it would read the next token instead of predicting it";
                require(!model.bidirectional, "data.dataset", "gpt", rule)
            }
            DatasetKind::Bert => {
                let rule = "\"gpt\": the model is a decoder; choose model.family = \"bert\", or \
                    model.parts.bidirectional = true";
                require(model.bidirectional, "data.dataset", "bert", rule)?;
                let rule = "0, or at least 2: a sample has two segments";
                let types = model.token_types;
                require(types != 1, "model.parts.token_types", types, rule)
            }
        }
    }
}

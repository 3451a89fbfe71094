//! Checks that a configuration can train a model on the data, before anything is written.

use burn::tensor::f16;
use megaburn_mesh::{Layout, ModelShape};
use megaburn_models::DecoderConfig;

use super::{DatasetKind, Dtype, InitFrom, TrainConfig, param_groups::check_groups, require};
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
        self.check_alibi(model)?;
        self.check_qk_clip(model)?;
        self.check_precision(layout, model)?;
        self.check_fp8_moments(layout, model)?;
        self.parallel.pipelines(layout, model.layers, &self.train)
    }

    /// Refuses to clip queries and keys of a model whose logits do not follow from them alone.
    fn check_qk_clip(&self, model: &DecoderConfig) -> Result<(), TrainError> {
        let qk_clip = self.optimizer.qk_clip;
        let norms = "false for this model: its norms of queries and keys (model.parts.qk_norm) undo a \
            scaling of their weights, and bound the logits themselves";
        require(
            !qk_clip || model.qk_norm.is_none(),
            "optimizer.qk_clip",
            true,
            norms,
        )?;
        let is_crossed = model.encoder_layers > 0 || model.positions.relative().is_some();
        let crossed = "false for this model: logits of cross attention (model.encoder_layers) and logits \
            with a relative bias (model.parts.positions) are not recorded";
        require(!qk_clip || !is_crossed, "optimizer.qk_clip", true, crossed)?;
        let logged = self.train.log_max_attention_logit;
        require(
            !logged || !is_crossed,
            "train.log_max_attention_logit",
            true,
            crossed,
        )
    }

    /// Refuses ALiBi whose features exceed the range of f16, in which they would become infinite.
    fn check_alibi(&self, model: &DecoderConfig) -> Result<(), TrainError> {
        let Some(alibi) = model.positions.alibi() else {
            return Ok(());
        };
        let usual = (model.head_dim as f64).powf(-0.5);
        let scale = model.attention_scale.unwrap_or(usual);
        let largest = alibi.largest_feature(model.heads, scale);
        let dtype = self.train.dtype;
        let fits = dtype != Dtype::F16 || largest < f64::from(f16::MAX);
        let rule = format!(
            "f32 or bf16: 256 times the largest slope of ALiBi, divided by the factor of the scores \
            (model.parts.attention_scale), is {largest:.3e}, which f16 does not hold"
        );
        require(fits, "train.dtype", dtype, rule)
    }

    /// The model of a run that starts from random weights, for `vocab` token ids.
    pub(crate) fn fresh_model(&self, vocab: usize) -> DecoderConfig {
        self.model.decoder(self.data.longest_seq_len(), vocab)
    }

    /// The model of a run that starts from random weights, checked as a run checks it. If `model.vocab`
    /// is not set, it has the vocabulary of the byte tokenizer, because nothing is read.
    ///
    /// # Errors
    /// The model cannot be trained on `layout` with this configuration; the error names the key.
    pub fn planned_model(&self, layout: &Layout) -> Result<DecoderConfig, TrainError> {
        let model = self.fresh_model(megaburn_data::ByteTokenizer::VOCAB_SIZE);
        self.check_model(layout, &model)?;
        Ok(model)
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
    /// As [`check_model`](Self::check_model); also a vocabulary smaller than the tokenizer's, less
    /// data than one sample, or a group of `optimizer.groups` without parameters.
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
        check_groups(&self.optimizer.groups, &model)?;
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case("f16", "5e-4", true)]
    #[case("f16", "5e-3", false)]
    #[case("bf16", "5e-4", false)]
    fn alibi_that_f16_does_not_hold_is_refused(
        #[case] dtype: &str,
        #[case] scale: &str,
        #[case] is_refused: bool,
    ) {
        let text = format!(
            "[model.parts]\npositions = \"alibi\"\nattention_scale = {scale}
            [train]\ndtype = \"{dtype}\""
        );
        let layers = ConfigLayers::new().with_text("alibi", &text).unwrap();
        let checked = layers
            .with_layout("tp1")
            .unwrap()
            .load()
            .unwrap()
            .layout(None);
        let error = checked
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        let refused = error.contains("`train.dtype` is f16: it must be f32 or bf16");
        assert_eq!(refused, is_refused, "{error}");
        assert!(is_refused || error.is_empty(), "{error}");
    }
}

use burn::{
    prelude::Int,
    tensor::{Gradients, Tensor},
};
use megaburn_models::Decoder;
use megaburn_optim::GradientAccumulator;
use megaburn_pipeline::{Chunks, Output, Pass};

use crate::TrainError;

/// All samples of a rank as one micro-batch: to their logits, or with labels to the loss and back.
pub(super) struct WholeBatch<'a> {
    model: &'a Decoder,
    tokens: &'a Tensor<2, Int>,
    labels: Option<&'a Tensor<2, Int>>,
    /// What takes the gradients.
    pub(super) grads: Option<&'a mut GradientAccumulator>,
    /// On the last stage.
    pub(super) logits: Option<Tensor<3>>,
    /// On the last stage.
    pub(super) loss: Option<Tensor<1>>,
}

impl<'a> WholeBatch<'a> {
    pub(super) fn new(
        model: &'a Decoder,
        tokens: &'a Tensor<2, Int>,
        labels: Option<&'a Tensor<2, Int>>,
    ) -> Self {
        Self { model, tokens, labels, grads: None, logits: None, loss: None }
    }
}

impl Chunks for WholeBatch<'_> {
    type Error = TrainError;

    fn forward(&mut self, pass: Pass, input: Option<Tensor<3>>) -> Result<Output, TrainError> {
        let stage = self.model.stage(pass.chunk);
        let x = match input {
            Some(input) => stage.from_stream(input),
            None => stage.from_tokens(self.tokens.clone()),
        };
        if !stage.layers().loss {
            return Ok(Output::Stream(x.sum()));
        }
        let Some(labels) = self.labels else {
            self.logits = Some(stage.full_logits(x));
            return Ok(Output::Nothing);
        };
        let loss = stage.loss(x, labels.clone());
        self.loss = Some(loss.clone().inner());
        Ok(Output::Loss(loss))
    }

    fn backward(&mut self, pass: Pass, run: impl FnOnce() -> Gradients) -> Result<(), TrainError> {
        let Some(sums) = &mut self.grads else {
            drop(run());
            return Ok(());
        };
        sums.begin_micro_batch(pass.is_last);
        let mut grads = run();
        sums.accumulate(self.model, &mut grads);
        Ok(())
    }
}

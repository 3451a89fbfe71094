use burn::{
    prelude::Int,
    tensor::{Gradients, Tensor},
};
use megaburn_models::{
    Decoder,
    decoder::{MtpTargets, StageLosses},
};
use megaburn_optim::GradientAccumulator;
use megaburn_parallel::BatchContext;
use megaburn_pipeline::{MicroBatchStep, Output, StageExecutor};
use megaburn_train::TrainError;

/// Runs all samples of a rank as one micro-batch: to their logits, or with labels to the loss and
/// backward.
pub(crate) struct VerifyExecutor<'a> {
    model: &'a Decoder,
    tokens: &'a Tensor<2, Int>,
    labels: Option<&'a Tensor<2, Int>>,
    /// The inputs and labels of the multi-token-prediction depths.
    pub(crate) ahead: &'a [MtpTargets],
    /// The factor on their mean loss.
    pub(crate) scaling_factor: f64,
    /// Token types, padding and the labels of the binary head.
    pub(crate) context: BatchContext,
    /// The factor on the loss of the binary head.
    pub(crate) binary_factor: f64,
    /// Accumulates the gradients, if there is one.
    pub(crate) grads: Option<&'a mut GradientAccumulator>,
    /// The logits; only on the last stage.
    pub(crate) logits: Option<Tensor<3>>,
    /// The losses; only on the last stage.
    pub(crate) losses: Option<StageLosses>,
}

impl<'a> VerifyExecutor<'a> {
    pub(crate) fn new(
        model: &'a Decoder,
        tokens: &'a Tensor<2, Int>,
        labels: Option<&'a Tensor<2, Int>>,
    ) -> Self {
        let (ahead, scaling_factor, context, binary_factor) = Default::default();
        let (grads, logits, losses) = Default::default();
        Self {
            model,
            tokens,
            labels,
            ahead,
            scaling_factor,
            context,
            binary_factor,
            grads,
            logits,
            losses,
        }
    }
}

impl StageExecutor for VerifyExecutor<'_> {
    type Error = TrainError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        input: Option<Tensor<3>>,
    ) -> Result<Output, TrainError> {
        let model = self.model;
        let batch = self.context.clone();
        let x = input.unwrap_or_else(|| {
            let x = model.embed(self.tokens.clone(), &batch);
            match &batch.observer {
                Some(observer) => observer.observe(None, x),
                None => x,
            }
        });
        let x = model.forward_stage(pass.chunk, x, &batch);
        if !model.stages()[pass.chunk].loss {
            return Ok(Output::Stream(x.sum()));
        }
        let Some(labels) = self.labels else {
            self.logits = Some(model.full_logits_of(x));
            return Ok(Output::Nothing);
        };
        let losses = model.losses(x, labels.clone(), self.ahead, &batch);
        self.losses = Some(losses.inner());
        Ok(Output::Loss(
            losses.total(self.scaling_factor, self.binary_factor),
        ))
    }

    fn backward(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce() -> Gradients,
    ) -> Result<(), TrainError> {
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

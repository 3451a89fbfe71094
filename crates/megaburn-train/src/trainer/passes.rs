//! The forward and backward passes of this rank's chunks.

use burn::{
    prelude::Device,
    tensor::{Gradients, Tensor},
};
use megaburn_data::Samples;
use megaburn_models::Decoder;
use megaburn_parallel::{BatchContext, BlockStatistics, Residual};
use megaburn_pipeline::{MicroBatchStep, Output, StageExecutor, StageLayers};

use crate::{
    error::TrainError,
    part::Part,
    trainer::{Trainer, batch::Batch, hybrid_context::HybridContext, stats::Losses},
};

/// The ranks over which gradients are reduced while they are accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReduceScope {
    /// Only this rank: gradients are summed over its micro-batches.
    Local,
    /// The data-parallel ranks too.
    DataParallel,
}

/// The passes of a training step.
pub(super) struct Training<'a> {
    pub(super) trainer: &'a mut Trainer,
    pub(super) reduce_scope: ReduceScope,
    /// The factor on the loss before backward; `None` without loss scaling.
    pub(super) factor: Option<f64>,
    /// The factor on the loss of the binary head, by which its mean over rows is added to the mean
    /// over tokens.
    pub(super) binary_factor: f64,
    pub(super) inner_device: Device,
    pub(super) losses: Losses,
}

impl Training<'_> {
    fn begin(&mut self, pass: MicroBatchStep) -> Part {
        let backward = self.trainer.core.pass_part("backward", pass);
        self.trainer.core.groups.world.pulse().beat();
        if self.reduce_scope == ReduceScope::DataParallel
            && self.trainer.core.config.parallel.overlap
        {
            self.trainer.core.grads.begin_micro_batch(pass.is_last);
        }
        backward
    }

    /// Called after a backward pass, or a part of one.
    fn end(&mut self) -> Result<(), TrainError> {
        self.trainer.core.groups.world.pulse().beat();
        match self.reduce_scope {
            ReduceScope::DataParallel => Ok(self.trainer.core.grads.end_micro_batch()?),
            ReduceScope::Local => Ok(()),
        }
    }
}

impl StageExecutor for Training<'_> {
    type Error = TrainError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        input: Option<Tensor<3>>,
    ) -> Result<Output, TrainError> {
        let Self {
            trainer,
            inner_device,
            losses,
            factor,
            binary_factor,
            reduce_scope,
        } = self;
        trainer.core.groups.world.pulse().beat();
        let model = trainer.model_in_flight();
        let layers = &model.stages()[pass.chunk];
        let batch = || -> Result<Batch, TrainError> {
            if let Some(hybrid) = &trainer.hybrid {
                return hybrid.batch(pass.micro_batch, inner_device);
            }
            let (samples, counted) = trainer.rows(pass.micro_batch)?;
            Ok(trainer.collator().batch(&samples, counted, inner_device)?)
        };
        let of_experts =
            trainer.core.next_batch().has_padding() && trainer.model_config.experts.is_some();
        let needs_batch = of_experts || trainer.needs_batch(layers);
        let reading = trainer.core.data_part(pass);
        let batch = needs_batch.then(batch).transpose()?;
        drop(reading);
        let block = || trainer.token_block(pass.micro_batch);
        let statistics = trainer.core.block_statistics.clone();
        let statistics = statistics.filter(|_| *reduce_scope == ReduceScope::DataParallel);
        let _counted = statistics.as_ref().map(BlockStatistics::forward);
        let context = BatchContext {
            statistics,
            loss_factor: Some(factor.unwrap_or(1.0)),
            // There is no dropout with hybrid context parallelism.
            block: trainer.hybrid.is_none().then(block),
            ..trainer.batch_context(batch.as_ref())
        };
        let _forward = trainer.core.pass_part("forward", pass);
        let stream = forward_stage(model, pass.chunk, input, batch.as_ref(), &context);
        let Some(batch) = batch.filter(|_| layers.loss) else {
            return Ok(Output::Stream(stream.sum()));
        };
        let found = model.losses(stream, batch.labels.clone(), &batch.ahead, &context);
        losses.add(found.inner(), &batch, &trainer.model_config.flop_shape());
        let loss = found.total(
            trainer.core.config.train.mtp_loss_scaling_factor,
            *binary_factor,
        );
        Ok(Output::Loss(match factor {
            Some(factor) => loss.mul_scalar(*factor),
            None => loss,
        }))
    }

    fn backward(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce() -> Gradients,
    ) -> Result<(), TrainError> {
        let _backward = self.begin(pass);
        let mut grads = run();
        self.trainer.core.accumulate(&mut grads);
        self.end()
    }

    fn backward_weight(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce(),
    ) -> Result<(), TrainError> {
        let _backward = self.begin(pass);
        run();
        self.trainer.core.grads.end_backward();
        self.end()
    }
}

/// The passes of an evaluation.
pub(super) struct Evaluation<'a> {
    pub(super) trainer: &'a Trainer,
    pub(super) model: &'a Decoder,
    /// The first sample of the global batch, and the number of all samples of the evaluation.
    pub(super) first: u64,
    pub(super) total: u64,
    pub(super) valid: &'a dyn Samples,
    pub(super) inner_device: &'a Device,
    pub(super) losses: &'a mut Losses,
    /// The assignment of the global batch's documents, with hybrid context parallelism.
    pub(super) hybrid: Option<&'a HybridContext>,
}

impl StageExecutor for Evaluation<'_> {
    type Error = TrainError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        input: Option<Tensor<3>>,
    ) -> Result<Output, TrainError> {
        let Self {
            trainer,
            first,
            total,
            inner_device,
            ..
        } = *self;
        trainer.core.groups.world.pulse().beat();
        let layers = &self.model.stages()[pass.chunk];
        let batch = || -> Result<Batch, TrainError> {
            if let Some(hybrid) = self.hybrid {
                return hybrid.batch(pass.micro_batch, inner_device);
            }
            let dp = trainer.core.groups.dp.rank();
            let batch = trainer.core.batch;
            let numbers = batch.micro_batch(first, dp, pass.micro_batch);
            let of_step = batch.counted(first, dp, pass.micro_batch);
            // After the end of the data the samples start over; those do not count.
            let end = of_step
                .end
                .min(total.saturating_sub(numbers.start) as usize);
            let counted = of_step.start..end;
            let num_samples = self.valid.num_samples();
            let samples = numbers.map(|number| self.valid.sample(number % num_samples));
            let samples = samples.collect::<Result<Vec<_>, _>>()?;
            Ok(trainer.collator().batch(&samples, counted, inner_device)?)
        };
        // Experts must not process samples that do not count, in any stage.
        let is_cut = total < first + trainer.core.config.train.global_batch as u64
            || trainer.core.batch.has_padding();
        let of_experts = is_cut && trainer.model_config.experts.is_some();
        let needs_batch = of_experts || trainer.needs_batch(layers);
        let reading = trainer.core.data_part(pass);
        let batch = needs_batch.then(batch).transpose()?;
        drop(reading);
        let context = trainer.batch_context(batch.as_ref());
        let stream = forward_stage(self.model, pass.chunk, input, batch.as_ref(), &context);
        let Some(batch) = batch.filter(|_| layers.loss) else {
            return Ok(Output::Stream(stream.sum()));
        };
        let labels = batch.labels.clone();
        let found = self.model.losses(stream, labels, &batch.ahead, &context);
        self.losses
            .add(found, &batch, &trainer.model_config.flop_shape());
        Ok(Output::Nothing)
    }
}

impl Trainer {
    /// Whether a stage needs tokens, labels, or the ends of documents or sequences. All stages need to
    /// know the padding of masked sentences.
    fn needs_batch(&self, stage: &StageLayers) -> bool {
        let has_padding = self.collator().padded > self.core.config.data.seq_len;
        let of_experts = has_padding && self.model_config.experts.is_some();
        let is_end = stage.embedding || stage.loss;
        let is_padded = self.core.config.data.dataset.is_masked();
        is_end || self.core.config.data.documents || is_padded || of_experts
    }

    /// The documents, loss mask, context-parallel group and length of a batch.
    fn batch_context(&self, batch: Option<&Batch>) -> BatchContext {
        BatchContext {
            documents: batch.and_then(|batch| batch.documents.clone()),
            encoder: batch.and_then(|batch| batch.encoder.clone()),
            token_types: batch.and_then(|batch| batch.token_types.clone()),
            sentence_order: batch.and_then(|batch| batch.sentence_order.clone()),
            counted: batch.and_then(|batch| batch.loss_mask_values.clone()),
            parallel: batch.and_then(|batch| batch.parallel.clone()),
            seq_len: Some(self.core.config.data.seq_len),
            ..BatchContext::default()
        }
    }
}

/// The residual stream after a stage, from its input or the tokens of the batch.
fn forward_stage(
    model: &Decoder,
    chunk: usize,
    input: Option<Tensor<3>>,
    batch: Option<&Batch>,
    context: &BatchContext,
) -> Residual {
    let x = match (input, batch) {
        (Some(input), _) => input,
        (None, Some(batch)) => model.embed(batch.tokens.clone(), context),
        (None, None) => unreachable!("the first stage needs tokens"),
    };
    model.forward_stage(chunk, x, context)
}

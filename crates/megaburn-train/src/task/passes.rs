//! The forward and backward passes of a task's model.

use burn::{
    prelude::Device,
    tensor::{Gradients, Tensor},
};
use megaburn_data::EpochOrder;
use megaburn_parallel::TokenBlock;
use megaburn_pipeline::{MicroBatchStep, Output, StageExecutor};

use super::{
    data::{MicroBatch, TrainData},
    error::TaskRunError,
    model::{LossSum, StageOutput, TrainModel},
    stage::Stage,
    totals::Totals,
};
use crate::{
    error::TrainError,
    part::Part,
    trainer_core::{Progress, TrainerCore},
};

/// The passes of a training step.
pub(super) struct Training<'a, M: TrainModel> {
    pub(super) core: &'a mut TrainerCore<M>,
    pub(super) data: &'a dyn TrainData<Batch = M::Batch>,
    pub(super) order: EpochOrder,
    pub(super) stages: &'a [Stage],
    /// The shape of the tensor between two stages.
    pub(super) shape: [usize; 3],
    /// The factor on the loss before backward; `None` without loss scaling.
    pub(super) factor: Option<f64>,
    /// Whether gradients are reduced over data-parallel ranks while they are accumulated.
    pub(super) reduces: bool,
    pub(super) totals: Totals,
}

impl<M: TrainModel> Training<'_, M> {
    /// The micro-batch of a pass.
    fn batch(&self, pass: MicroBatchStep) -> Result<M::Batch, TrainError> {
        let core = &self.core;
        let Progress {
            step,
            consumed_samples,
            ..
        } = core.progress;
        let dp = core.groups.dp.rank();
        let batch = core.next_batch();
        let numbers = batch.micro_batch(consumed_samples, dp, pass.micro_batch);
        let first = (numbers.start - consumed_samples) as usize;
        let block = TokenBlock::new(step, batch.global_batch_size(), first);
        let samples = numbers.map(|number| self.order.position(number).1 as usize);
        let samples = MicroBatch::new(samples.collect(), Some(block));
        read(self.data, &samples, &core.device)
    }

    fn begin(&mut self, pass: MicroBatchStep) -> Part {
        let backward = self.core.pass_part("backward", pass);
        self.core.groups.world.pulse().beat();
        if self.reduces && self.core.config.parallel.overlap {
            self.core.grads.begin_micro_batch(pass.is_last);
        }
        backward
    }

    /// Called after a backward pass, or a part of one.
    fn end(&mut self) -> Result<(), TrainError> {
        self.core.groups.world.pulse().beat();
        match self.reduces {
            true => Ok(self.core.grads.end_micro_batch()?),
            false => Ok(()),
        }
    }
}

impl<M: TrainModel> StageExecutor for Training<'_, M> {
    type Error = TrainError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        input: Option<Tensor<3>>,
    ) -> Result<Output, TrainError> {
        self.core.groups.world.pulse().beat();
        let reading = self.core.data_part(pass);
        let batch = self.batch(pass)?;
        drop(reading);
        let _forward = self.core.pass_part("forward", pass);
        let model = self.core.model_in_flight();
        let stage = &self.stages[pass.chunk];
        let loss = match checked(model.forward_stage(stage, input, batch), stage, self.shape)? {
            StageOutput::Stream(stream) => return Ok(Output::Stream(stream)),
            StageOutput::Loss(loss) => loss,
        };
        let sum = loss.sum.clone();
        self.totals.add(inner(loss))?;
        Ok(Output::Loss(match self.factor {
            Some(factor) => sum.mul_scalar(factor),
            None => sum,
        }))
    }

    fn backward(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce() -> Gradients,
    ) -> Result<(), TrainError> {
        let _backward = self.begin(pass);
        let mut grads = run();
        self.core.accumulate(&mut grads);
        self.end()
    }

    fn backward_weight(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce(),
    ) -> Result<(), TrainError> {
        let _backward = self.begin(pass);
        run();
        self.core.grads.end_backward();
        self.end()
    }
}

/// The passes of an evaluation.
pub(super) struct Evaluation<'a, M: TrainModel> {
    pub(super) core: &'a TrainerCore<M>,
    pub(super) model: &'a M,
    pub(super) data: &'a dyn TrainData<Batch = M::Batch>,
    pub(super) stages: &'a [Stage],
    /// The shape of the tensor between two stages.
    pub(super) shape: [usize; 3],
    /// The first sample of the global batch.
    pub(super) first: u64,
    pub(super) totals: &'a mut Totals,
}

impl<M: TrainModel> StageExecutor for Evaluation<'_, M> {
    type Error = TrainError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        input: Option<Tensor<3>>,
    ) -> Result<Output, TrainError> {
        let core = self.core;
        core.groups.world.pulse().beat();
        let dp = core.groups.dp.rank();
        let numbers = core.batch.micro_batch(self.first, dp, pass.micro_batch);
        let samples = numbers.map(|number| number as usize).collect();
        let samples = MicroBatch::new(samples, None);
        let reading = core.data_part(pass);
        let batch = read(self.data, &samples, &core.device.clone().inner())?;
        drop(reading);
        let stage = &self.stages[pass.chunk];
        match checked(
            self.model.forward_stage(stage, input, batch),
            stage,
            self.shape,
        )? {
            StageOutput::Stream(stream) => Ok(Output::Stream(stream)),
            StageOutput::Loss(loss) => {
                self.totals.add(loss)?;
                Ok(Output::Nothing)
            }
        }
    }
}

/// The micro-batch of these samples.
fn read<B>(
    data: &dyn TrainData<Batch = B>,
    samples: &MicroBatch,
    device: &Device,
) -> Result<B, TrainError> {
    let batch = data.batch(samples, device);
    Ok(batch.map_err(|why| TaskRunError::cannot("read a micro-batch", why))?)
}

/// The output of a stage, if it is what the stage must return: a tensor of the shape that is sent, or
/// the loss.
fn checked(
    output: StageOutput,
    stage: &Stage,
    shape: [usize; 3],
) -> Result<StageOutput, TrainError> {
    let why = match (&output, stage.is_last) {
        (StageOutput::Stream(stream), false) if stream.dims() != shape => format!(
            "the tensor after block {} is {:?}, but PipelineSplit says {shape:?}",
            stage.blocks.end,
            stream.dims()
        ),
        (StageOutput::Stream(_), false) | (StageOutput::Loss(_), true) => return Ok(output),
        (StageOutput::Loss(_), false) => "a stage before the last one returned a loss: \
            TrainModel::forward_stage must return the output of the stage's blocks there"
            .to_string(),
        (StageOutput::Stream(_), true) => "the last stage returned a stream: \
            TrainModel::forward_stage must return the loss there"
            .to_string(),
    };
    Err(TaskRunError::cannot("compute a stage of its pipeline", why).into())
}

/// The loss without autodiff.
fn inner(loss: LossSum) -> LossSum {
    let metrics = loss.metrics.into_iter();
    LossSum {
        sum: loss.sum.inner(),
        metrics: metrics.map(|(name, sum)| (name, sum.inner())).collect(),
        ..loss
    }
}

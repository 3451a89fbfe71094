//! What a model must do to be trained.

use std::fmt::Debug;

use burn::{module::Module, tensor::Tensor};
use megaburn_parallel::Sharded;

use super::stage::Stage;

/// A model that a [`ModelTrainer`](super::ModelTrainer) trains: it computes the loss of a
/// micro-batch.
///
/// Ranks that split the model by tensor parallelism get the same micro-batch and must compute the
/// same loss, as the parallel layers do. Data-parallel ranks get different ones.
pub trait TrainModel: Module + Sharded + Debug {
    /// What a micro-batch is.
    type Batch;

    /// The names of the metrics of [`LossSum::with_metric`].
    const METRICS: &'static [&'static str] = &[];

    /// The loss of a micro-batch, summed over its items.
    fn loss(&self, batch: Self::Batch) -> LossSum;

    /// Computes one stage of a pipeline: from the micro-batch in the first stage and from `input`, the
    /// output of the stage before, in the others. The last stage returns the loss. A model that
    /// leaves this out is trained without a pipeline.
    ///
    /// # Shapes
    /// `input` and the output: [`PipelineSplit`](super::PipelineSplit).
    fn forward_stage(
        &self,
        stage: &Stage,
        input: Option<Tensor<3>>,
        batch: Self::Batch,
    ) -> StageOutput {
        let _ = (stage, input);
        StageOutput::Loss(self.loss(batch))
    }
}

/// What a stage computes.
#[derive(Debug)]
pub enum StageOutput {
    /// The input of the next stage.
    Stream(Tensor<3>),
    /// The loss, in the last stage.
    Loss(LossSum),
}

/// The loss of a micro-batch: a sum over items, which are samples, tokens or whatever the loss is a
/// mean over. The trainer divides by the items of the whole step, however these were split.
#[derive(Clone, Debug)]
pub struct LossSum {
    pub(super) sum: Tensor<1>,
    pub(super) num_items: usize,
    pub(super) metrics: Vec<(&'static str, Tensor<1>)>,
    pub(super) flops: f64,
}

impl LossSum {
    /// A loss that was summed over `num_items` items.
    ///
    /// # Shapes
    /// `sum`: `[1]`
    pub fn new(sum: Tensor<1>, num_items: usize) -> Self {
        Self {
            sum,
            num_items,
            metrics: Vec::new(),
            flops: 0.0,
        }
    }

    /// Adds a metric that was summed over the same items, such as the number of right answers. Its
    /// mean is logged under `name`, which must be one of [`TrainModel::METRICS`].
    ///
    /// # Shapes
    /// `sum`: `[1]`
    #[must_use]
    pub fn with_metric(mut self, name: &'static str, sum: Tensor<1>) -> Self {
        self.metrics.push((name, sum));
        self
    }

    /// Sets the floating-point operations of forward and backward for the micro-batch, over all
    /// ranks that share the model. They are the source of the TFLOP/s that are logged.
    #[must_use]
    pub fn with_flops(mut self, flops: f64) -> Self {
        self.flops = flops;
        self
    }
}

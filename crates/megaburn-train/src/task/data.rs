//! The samples of a task.

use std::{fmt, ops::Deref};

use burn::prelude::Device;
use megaburn_data::EpochOrder;
use megaburn_parallel::TokenBlock;

use super::error::TaskError;

/// Which samples a micro-batch consists of: a list of their numbers, and their place in the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    samples: Vec<usize>,
    /// In training, the place of the samples in the run. It keys the masks of
    /// [`ParallelDropout`](megaburn_parallel::ParallelDropout), so that they do not depend on the
    /// layout; `None` in an evaluation, where nothing is dropped.
    pub block: Option<TokenBlock>,
}

impl MicroBatch {
    /// A micro-batch of these samples.
    pub fn new(samples: Vec<usize>, block: Option<TokenBlock>) -> Self {
        Self { samples, block }
    }
}

/// The numbers of the samples.
impl Deref for MicroBatch {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.samples
    }
}

/// Samples by number, from which micro-batches are made. Any rank may ask for any of them.
///
/// A data set of Burn is one through [`BatchFn`].
pub trait TrainData: Send + Sync {
    /// What the model gets of a micro-batch.
    type Batch;

    /// Number of samples.
    fn num_samples(&self) -> usize;

    /// The tensors of a micro-batch on `device`, which has autodiff in training and has not in an
    /// evaluation.
    ///
    /// # Errors
    /// A sample cannot be read.
    fn batch(&self, samples: &MicroBatch, device: &Device) -> Result<Self::Batch, TaskError>;
}

/// Samples from a function. With a data set and a batcher of Burn it is
/// `|samples, device| batcher.batch(samples.iter().filter_map(|i| dataset.get(*i)).collect(), device)`.
pub struct BatchFn<F> {
    num_samples: usize,
    batch: F,
}

impl<F> BatchFn<F> {
    /// `num_samples` samples, of which `batch` makes micro-batches.
    pub fn new<B>(num_samples: usize, batch: F) -> Self
    where
        F: Fn(&MicroBatch, &Device) -> B,
    {
        Self { num_samples, batch }
    }
}

impl<F> fmt::Debug for BatchFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchFn")
            .field("num_samples", &self.num_samples)
            .finish_non_exhaustive()
    }
}

impl<B, F: Fn(&MicroBatch, &Device) -> B + Send + Sync> TrainData for BatchFn<F> {
    type Batch = B;

    fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn batch(&self, samples: &MicroBatch, device: &Device) -> Result<B, TaskError> {
        Ok((self.batch)(samples, device))
    }
}

/// The training data of a task, and its validation data if it has any.
pub struct TaskData<B> {
    pub(super) train: Box<dyn TrainData<Batch = B>>,
    pub(super) valid: Option<Box<dyn TrainData<Batch = B>>>,
}

impl<B> TaskData<B> {
    /// Trains on `train`: every sample once in each epoch, in an order that follows from `run.seed`.
    pub fn new(train: impl TrainData<Batch = B> + 'static) -> Self {
        Self {
            train: Box::new(train),
            valid: None,
        }
    }

    /// Evaluates on `valid`, in its own order. The samples after the last full global batch are left
    /// out.
    #[must_use]
    pub fn with_validation(mut self, valid: impl TrainData<Batch = B> + 'static) -> Self {
        self.valid = Some(Box::new(valid));
        self
    }

    /// The order of the training samples.
    pub(super) fn order(&self, seed: u64) -> EpochOrder {
        EpochOrder::shuffled(self.train.num_samples() as u64, seed, 0)
    }
}

impl<B> fmt::Debug for TaskData<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let valid = self.valid.as_ref().map(|valid| valid.num_samples());
        f.debug_struct("TaskData")
            .field("train", &self.train.num_samples())
            .field("valid", &valid)
            .finish()
    }
}

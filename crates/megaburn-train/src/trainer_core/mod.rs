//! What every trainer of a rank has, whatever it trains: the rank's part of the model with its
//! gradients and its optimizer, the progress of the run, and its checkpoints.
//!
//! [`Trainer`](crate::Trainer) adds what a decoder has in addition, and
//! [`ModelTrainer`](crate::ModelTrainer) the batches and the loss of any other model.

mod access;
mod discard;
mod finite_weights;
mod first_times;
mod held_tensors;
mod layer_statistics;
mod load;
mod newest;
mod origin;
mod owner;
mod place;
mod progress;
mod reduced;
mod replicas;
mod rollback;
mod save;
mod schedules;
mod spikes;
mod step;
mod stored_retention;
mod suspects;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use burn::{module::Module, prelude::Device, tensor::Tensor};
use megaburn_checkpoint::Background;
use megaburn_collective::{Group, ProcessGroups};
use megaburn_data::GlobalBatch;
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_optim::{D2hCopy, GradientAccumulator, LossScaler, Optimizer, Sharding};
use megaburn_parallel::BlockStatistics;
use megaburn_report::{
    LossWindow,
    metrics::{EvalMetrics, LayerStatistics},
    profile::Spans,
};

use crate::{
    config::{Dtype, TrainConfig},
    error::TrainError,
    pipeline::Pipeline,
    run_folder::RunShare,
    train_state::TrainState,
};

pub(crate) use first_times::{FirstTimes, Work};
pub(crate) use load::difference;
pub(crate) use origin::with_diagnosis;
pub use progress::Progress;
pub(crate) use reduced::{sum_over, sums_over, world_max};
pub(crate) use replicas::Unchanged;
pub(crate) use rollback::{Rollback, Spike};
pub(crate) use save::Record;
pub(crate) use schedules::{Schedules, StepRates};
pub(crate) use step::Outcome;
pub(crate) use suspects::{first_suspect, starts_again, suspects_of};

/// The state of a rank that trains a model of type `M`.
#[derive(Debug)]
pub(crate) struct TrainerCore<M> {
    pub(crate) config: Arc<TrainConfig>,
    pub(crate) groups: ProcessGroups,
    pub(crate) pipeline: Pipeline,
    pub(crate) device: Device,
    /// Always `Some`, except while the optimizer replaces it.
    pub(crate) model: Option<M>,
    pub(crate) plan: ShardPlan,
    pub(crate) sharding: Sharding,
    pub(crate) grads: GradientAccumulator,
    pub(crate) optimizer: Optimizer,
    pub(crate) schedules: Schedules,
    /// Only in f16.
    pub(crate) loss_scaler: Option<LossScaler>,
    /// Number of consecutive skipped steps so far.
    consecutive_skips: u64,
    /// The batch of an evaluation, and of a step after the batch ramp.
    pub(crate) batch: GlobalBatch,
    pub(crate) progress: Progress,
    pub(crate) enqueued: Duration,
    /// The losses of the last updates, with `train.on_spike`.
    pub(crate) losses: LossWindow,
    /// The loss above which this step is a spike.
    spike_bound: Option<f64>,
    /// The last step, if its loss was a spike.
    pub(crate) spike: Option<Spike>,
    /// The rollbacks of the run so far, with `train.on_spike = "rollback"`.
    pub(crate) rollbacks: Vec<Rollback>,
    /// The losses of this rank's micro-batches in the last step, still on the device.
    pub(crate) own_losses: Option<Tensor<1>>,
    /// The run folder that checkpoints are saved to, if the run has taken it.
    pub(crate) run: Option<RunShare>,
    /// The validation loss at each step that was evaluated, only on rank 0; for
    /// `train.keep_best_checkpoints`.
    pub(crate) eval_losses: BTreeMap<u64, f64>,
    /// The steps of checkpoints that are being uploaded.
    uploading: BTreeSet<u64>,
    /// Copies to the host of an asynchronous save, which the next update waits for.
    copies_in_flight: Vec<D2hCopy>,
    /// The thread that removes what `--fresh` set aside, on rank 0 once there is a checkpoint.
    discarding: RefCell<Option<Background<()>>>,
    pub(crate) first_times: FirstTimes,
    pub(crate) unchanged: Unchanged,
    /// Records the parts of steps while a profile is taken.
    pub(crate) spans: Spans,
    /// Counts activations in a step whose statistics are logged.
    pub(crate) block_statistics: Option<BlockStatistics>,
    /// The statistics of the layers in the last step, on rank 0 if they are logged.
    pub(crate) layer_statistics: Option<Vec<LayerStatistics>>,
}

impl<M: Module> TrainerCore<M> {
    /// The state before the first step.
    ///
    /// # Errors
    /// A loss scale or a batch that cannot be used.
    pub(crate) fn new(
        config: Arc<TrainConfig>,
        groups: ProcessGroups,
        device: Device,
        schedules: Schedules,
        state: TrainState<M>,
    ) -> Result<Self, TrainError> {
        let TrainState {
            pipeline,
            model,
            plan,
            sharding,
            grads,
            optimizer,
        } = state;
        Ok(Self {
            grads,
            sharding,
            optimizer,
            schedules,
            loss_scaler: match config.train.dtype {
                Dtype::F16 => Some(LossScaler::new(config.optimizer.scaling())?),
                Dtype::F32 | Dtype::Bf16 => None,
            },
            consecutive_skips: 0,
            batch: config
                .train
                .batch_of(config.train.global_batch, groups.layout().dp)?,
            model: Some(model),
            plan,
            groups,
            pipeline,
            device,
            progress: Progress::default(),
            losses: LossWindow::default(),
            spike_bound: None,
            spike: None,
            rollbacks: Vec::new(),
            own_losses: None,
            enqueued: Duration::ZERO,
            run: None,
            eval_losses: BTreeMap::new(),
            uploading: BTreeSet::new(),
            copies_in_flight: Vec::new(),
            discarding: RefCell::new(None),
            first_times: FirstTimes::default(),
            unchanged: Unchanged::default(),
            spans: Spans::default(),
            block_statistics: None,
            layer_statistics: None,
            config,
        })
    }

    /// Saves to the run's folder from now on, as long as the folder belongs to the run. `compiles`
    /// says whether this rank compiles kernels, as ranks on GPUs do.
    pub(crate) fn enter_run(&mut self, run: RunShare, compiles: bool) {
        self.run = Some(run);
        self.first_times = FirstTimes::new(compiles);
    }

    pub(crate) fn world(&self) -> &Group {
        &self.groups.world
    }

    /// The layout of the run.
    pub(crate) fn layout(&self) -> Layout {
        self.groups.layout()
    }

    /// The progress of the run.
    pub(crate) fn progress(&self) -> Progress {
        self.progress
    }

    /// Whether all steps are done.
    pub(crate) fn is_finished(&self) -> bool {
        self.progress.step >= self.config.train.steps
    }

    /// The batch of the next step.
    pub(crate) fn next_batch(&self) -> GlobalBatch {
        self.batch_after(self.progress.consumed_samples)
    }

    /// The batch of the step that begins after `consumed` samples.
    pub(crate) fn batch_after(&self, consumed: u64) -> GlobalBatch {
        let samples = self.schedules.batch.batch_size(consumed);
        let batch = self.config.train.batch_of(samples, self.batch.dp());
        batch.expect("every batch size was validated")
    }

    /// Adds the losses of evaluations on the validation set called `first`, which decide which
    /// checkpoints are the best.
    pub(crate) fn add_eval_losses(
        &mut self,
        first: Option<&str>,
        evals: impl IntoIterator<Item = EvalMetrics>,
    ) {
        let counts =
            |eval: &EvalMetrics| eval.data.as_deref() == first && eval.eval_loss.is_finite();
        let own = evals.into_iter().filter(counts);
        self.eval_losses
            .extend(own.map(|eval| (eval.step, eval.eval_loss)));
    }
}

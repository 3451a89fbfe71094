//! The trainer of one rank.

mod access;
mod amax_histories;
mod batch;
mod collator;
mod conversions;
mod delayed_scales;
mod discard;
#[cfg(test)]
mod estimated;
mod evaluate;
mod experts;
mod finite_weights;
mod first_times;
mod fp8_params;
mod held_tensors;
mod hybrid_context;
mod inputs;
mod masked_row;
#[cfg(test)]
mod narrow_state;
mod newest;
mod nonfinite_origin;
mod owner;
mod packed_row;
mod pair_rows;
mod passes;
mod place;
mod precision_fallback;
mod precision_phases;
mod precision_state;
mod qk_clip;
mod quantization_counts;
mod replicas;
mod resume;
mod resume_samples;
mod sample;
mod save;
mod schedules;
mod stats;
mod step;
mod stored_retention;
#[cfg(test)]
mod testing;
mod update;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use burn::prelude::Device;
use megaburn_checkpoint::Background;
use megaburn_collective::{Group, ProcessGroups};
use megaburn_data::{GlobalBatch, Sample};
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_models::{Decoder, DecoderConfig};
use megaburn_optim::{D2hCopy, GradientAccumulator, LossScaler, Optimizer, Sharding};
use megaburn_report::metrics::EvalMetrics;

use crate::{
    config::{Dtype, InitFrom, TrainConfig},
    data::{RunData, RunSamples, SourceReading},
    error::TrainError,
    pipeline::Pipeline,
    run_folder::RunShare,
    train_state::{TrainState, TrainStateConfig},
};
use amax_histories::AmaxHistories;
use first_times::FirstTimes;
use hybrid_context::HybridContext;
use precision_state::PrecisionState;
use schedules::Schedules;

pub(crate) use amax_histories::SavedAmaxes;
pub use conversions::{Conversions, LossScaleConversion};
pub use delayed_scales::ResumedAmaxes;
pub use resume::Resumed;
pub(crate) use resume::read_state;
pub(crate) use save::{ImportedFrom, TrainerState};

/// The training state of one rank. [`pretrain`](crate::pretrain) runs one; a custom loop does this:
///
/// ```
/// use std::sync::Arc;
///
/// use burn::prelude::Device;
/// use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
/// use megaburn_train::{ConfigLayers, RunData, TrainError, Trainer};
///
/// let config = "[model]\nhidden = 16\nffn = 32\nlayers = 1\nheads = 2
/// [data]\nseq_len = 8\n[train]\nglobal_batch = 4\n[optimizer]\nwarmup_steps = 0";
/// let file = std::env::temp_dir().join(format!("trainer-{}.txt", std::process::id()));
/// std::fs::write(&file, "It was the best of times. ".repeat(50)).unwrap();
/// let config = ConfigLayers::new().with_text("example", config)?;
/// let config = Arc::new(config.with_data(&file.to_string_lossy())?.with_layout("tp2-sp")?.load()?);
/// let data = Arc::new(RunData::load(&config)?);
///
/// let layout = config.layout(None)?;
/// let losses = run_threads(layout.world_size(), GroupOptions::default(), |world| {
///     let groups = ProcessGroups::new(&world, layout)?;
///     let device = Device::flex().autodiff();
///     let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
///     let first = trainer.step()?.loss;
///     for _ in 0..3 {
///         trainer.step()?;
///     }
///     Ok::<_, TrainError>((first, trainer.evaluate()?.eval_loss))
/// });
/// for rank in losses {
///     let (first, eval) = rank.unwrap();
///     assert!(eval < first);
/// }
/// # Ok::<(), TrainError>(())
/// ```
#[derive(Debug)]
pub struct Trainer {
    config: Arc<TrainConfig>,
    model_config: DecoderConfig,
    groups: ProcessGroups,
    pipeline: Pipeline,
    /// The assignment of documents to ranks, with hybrid context parallelism.
    hybrid: Option<HybridContext>,
    device: Device,
    /// Always `Some`, except while the optimizer replaces it.
    model: Option<Decoder>,
    plan: ShardPlan,
    sharding: Sharding,
    grads: GradientAccumulator,
    optimizer: Optimizer,
    schedules: Schedules,
    /// Only in f16.
    loss_scaler: Option<LossScaler>,
    /// Number of consecutive skipped steps so far.
    consecutive_skips: u64,
    samples: RunSamples,
    /// The samples of this rank's micro-batches in the step, if they were read before it.
    step_samples: Vec<Vec<Sample>>,
    /// The batch of an evaluation, and of a step after the batch ramp.
    batch: GlobalBatch,
    /// For each layer of the full model, each expert's share of the last batch's tokens.
    last_load: Vec<Option<Vec<f64>>>,
    /// The largest magnitudes of the steps before, with delayed scaling.
    amax_histories: AmaxHistories,
    /// The factor of the loss in the current step's gradients.
    loss_factor: f64,
    /// The precision of layers, which may change from step to step.
    precision: PrecisionState,
    data: Arc<RunData>,
    progress: Progress,
    enqueued: Duration,
    /// The run folder that checkpoints are saved to, if the run has taken it.
    run: Option<RunShare>,
    /// The validation loss at each step that was evaluated, only on rank 0; for
    /// `train.keep_best_checkpoints`.
    eval_losses: BTreeMap<u64, f64>,
    /// The program whose checkpoint the run was made from, if it was.
    imported: Option<ImportedFrom>,
    /// The steps of checkpoints that are being uploaded.
    uploading: BTreeSet<u64>,
    /// Copies to the host of an asynchronous save, which the next update waits for.
    copies_in_flight: Vec<D2hCopy>,
    /// The thread that removes what `--fresh` set aside, on rank 0 once there is a checkpoint.
    discarding: RefCell<Option<Background<()>>>,
    first_times: FirstTimes,
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    /// Number of optimizer steps done, including skipped ones.
    pub step: u64,
    /// Number of training samples read.
    pub consumed_samples: u64,
    /// Number of these steps that were skipped, because their gradient overflowed or exceeded the
    /// threshold.
    #[serde(default)]
    pub skipped_steps: u64,
    /// Number of samples of the skipped steps, for which schedules do not advance.
    #[serde(default)]
    pub skipped_samples: u64,
}

impl Trainer {
    /// A trainer at step 0. Its model is freshly initialized, or the one that `model.init` names.
    /// (If `model.init` is set and the run has a checkpoint, [`resume`](Self::resume) loads the
    /// weights.) `groups` determines the layout; the one in `config` is ignored.
    ///
    /// # Errors
    /// The layout does not split the model or the batch, or the data is shorter than one sample.
    /// # Collective
    /// No communication.
    pub fn new(
        config: Arc<TrainConfig>,
        groups: ProcessGroups,
        device: Device,
        data: Arc<RunData>,
    ) -> Result<Self, TrainError> {
        let start = config.start(false)?;
        Self::starting_from(start.as_ref(), config, groups, device, data)
    }

    /// As [`new`](Self::new), with the model already opened.
    pub(crate) fn starting_from(
        start: Option<&InitFrom>,
        config: Arc<TrainConfig>,
        groups: ProcessGroups,
        device: Device,
        data: Arc<RunData>,
    ) -> Result<Self, TrainError> {
        let layout = groups.layout();
        let model_config = config.check_start(&layout, start, &data)?;
        config.check_device(&device)?;
        let samples = data.samples(&config)?.watched(&groups);
        let TrainState {
            pipeline,
            model,
            plan,
            sharding,
            grads,
            optimizer,
        } = TrainStateConfig {
            model: &model_config,
            options: config.model_options(&layout, &model_config)?,
            parallel: &config.parallel,
            optimizer: &config.optimizer,
            dtype: config.train.dtype,
            weights: match start {
                Some(InitFrom::Init(source)) => Some(&**source),
                Some(InitFrom::Resumed(_)) | None => None,
            },
        }
        .init(&groups, &device)?;
        let hybrid = HybridContext::new(&config, &model_config, &groups)?;
        let trainer = Self {
            grads,
            sharding,
            optimizer,
            schedules: Schedules::of(&config)?,
            loss_scaler: match config.train.dtype {
                Dtype::F16 => Some(LossScaler::new(config.optimizer.scaling())?),
                Dtype::F32 | Dtype::Bf16 => None,
            },
            consecutive_skips: 0,
            samples,
            step_samples: Vec::new(),
            batch: GlobalBatch::new(
                config.train.global_batch,
                config.train.micro_batch,
                layout.dp,
            )?,
            last_load: vec![None; model_config.num_blocks()],
            amax_histories: AmaxHistories::new(&config.precision),
            loss_factor: 1.0,
            precision: PrecisionState::new(&config.precision),
            model: Some(model),
            plan,
            model_config,
            hybrid,
            groups,
            pipeline,
            device,
            data,
            progress: Progress::default(),
            enqueued: Duration::ZERO,
            run: None,
            eval_losses: BTreeMap::new(),
            imported: None,
            uploading: BTreeSet::new(),
            copies_in_flight: Vec::new(),
            discarding: RefCell::new(None),
            first_times: FirstTimes::default(),
            config,
        };
        trainer.begin_first_phase();
        Ok(trainer)
    }

    /// Saves to the run's folder, as long as the folder belongs to the run.
    pub(crate) fn in_run(self, run: RunShare) -> Self {
        Self {
            run: Some(run),
            ..self
        }
    }

    /// Sets whether this rank compiles kernels, as ranks on GPUs do.
    pub(crate) fn compiling(self, compiles: bool) -> Self {
        Self {
            first_times: FirstTimes::new(compiles),
            ..self
        }
    }

    /// How long the host worked on the last step before it waited for the loss: on a GPU, the time
    /// for enqueueing the step.
    pub fn enqueue_time(&self) -> Duration {
        self.enqueued
    }

    /// The progress of the run.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// How the run reads each training data set; empty in Megatron-LM's order.
    pub(crate) fn reading(&self) -> &[SourceReading] {
        &self.samples.reading
    }

    pub(crate) fn world(&self) -> &Group {
        &self.groups.world
    }

    /// The layout of the run.
    pub(crate) fn layout(&self) -> Layout {
        self.groups.layout()
    }

    pub(crate) fn model_config(&self) -> &DecoderConfig {
        &self.model_config
    }

    /// The batch of the next step.
    fn next_batch(&self) -> GlobalBatch {
        self.batch_after(self.progress.consumed_samples)
    }

    /// The batch of the step that begins after `consumed` samples.
    fn batch_after(&self, consumed: u64) -> GlobalBatch {
        let samples = self.schedules.batch.batch_size(consumed);
        let micro = self.batch.micro_batch_size();
        let dp = self.batch.dp();
        GlobalBatch::new(samples, micro, dp).expect("every batch size was validated")
    }

    /// Asks for the samples of the next two steps, if samples are read ahead.
    fn read_ahead(&self) {
        let Some(ahead) = &self.samples.read_ahead else {
            return;
        };
        let mut consumed = self.progress.consumed_samples;
        let left = self.config.train.steps.saturating_sub(self.progress.step);
        let steps = (0..left.min(2)).flat_map(|_| {
            let batch = self.batch_after(consumed);
            let first = consumed;
            consumed += batch.global_batch_size() as u64;
            match self.hybrid {
                Some(_) => first..consumed,
                None => batch.rank(first, self.groups.dp.rank()),
            }
        });
        ahead.request(steps);
    }

    /// Whether there is data to evaluate on.
    pub(crate) fn evaluates(&self) -> bool {
        !self.samples.valid.is_empty()
    }

    /// Whether there is data to test on at the end of the run.
    pub(crate) fn tests(&self) -> bool {
        !self.samples.test.is_empty()
    }

    /// The names of the evaluations on validation data.
    pub(crate) fn valid_names(&self) -> impl Iterator<Item = Option<&str>> {
        self.samples.valid.iter().map(|set| set.name.as_deref())
    }

    /// Adds the losses of evaluations on the first validation set, which decide which checkpoints
    /// are the best.
    pub(crate) fn add_eval_losses(&mut self, evals: impl IntoIterator<Item = EvalMetrics>) {
        let Some(first) = self.samples.valid.first() else {
            return;
        };
        let counts = |eval: &EvalMetrics| eval.data == first.name && eval.eval_loss.is_finite();
        let own = evals.into_iter().filter(counts);
        self.eval_losses
            .extend(own.map(|eval| (eval.step, eval.eval_loss)));
    }

    /// Whether all steps are done.
    pub(crate) fn is_finished(&self) -> bool {
        self.progress.step >= self.config.train.steps
    }

    /// This rank's part of the model. With `parallel.zero = 3` its sharded matrices hold
    /// placeholders: a rank keeps a shard of them, and all ranks that shard together must compute
    /// with the model, or [save](Self::save) it, together.
    pub fn model(&self) -> &Decoder {
        self.sharding.settle();
        self.model_in_flight()
    }
}

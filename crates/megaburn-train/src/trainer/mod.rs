//! The training loop of one rank.

mod collator;
#[cfg(test)]
mod estimated;
mod evaluate;
mod experts;
mod finite;
mod first_times;
mod hybrid_context;
mod nonfinite;
mod owner;
mod packed_row;
mod passes;
mod replicas;
mod resume;
mod sample;
mod save;
mod schedules;
mod stats;
mod step;
#[cfg(test)]
mod testing;

use std::{path::PathBuf, sync::Arc, time::Duration};

use burn::prelude::Device;
use megaburn_collective::ProcessGroups;
use megaburn_data::{GlobalBatch, Sampler};
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_models::{Decoder, DecoderConfig};
use megaburn_optim::{GradientAccumulator, LossScaler, Optimizer, Sharding};
use megaburn_parallel::{main_grads, shard_plan, vector_grads};

use crate::{
    TrainConfig, TrainError,
    config::{Dtype, InitFrom},
    data::RunData,
    pipeline::Pipeline,
    run_folder::{RunShare, names::CHECKPOINTS},
};
pub(crate) use experts::experts;
use first_times::FirstTimes;
use hybrid_context::HybridContext;
use schedules::Schedules;

pub use nonfinite::{Diagnosis, NonFiniteOrigin};
pub use resume::Resumed;

/// What a rank trains with. [`pretrain`](crate::pretrain) drives one; a loop of one's own does this:
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
    /// Where each pass has other ranks that share sequences.
    dynamic: Option<HybridContext>,
    device: Device,
    /// Always there, but while the optimizer turns it into the next one.
    model: Option<Decoder>,
    plan: ShardPlan,
    sharding: Sharding,
    grads: GradientAccumulator,
    optimizer: Optimizer,
    schedules: Schedules,
    /// In f16.
    loss_scaler: Option<LossScaler>,
    /// Steps up to now that changed nothing.
    consecutive_skips: u64,
    train: Sampler,
    /// None: nothing is evaluated.
    valid: Option<Sampler>,
    /// The batch of an evaluation, and of a step when it has grown.
    batch: GlobalBatch,
    /// Of the tokens of the last batch, the part that each expert got, layer by layer of the whole model.
    last_load: Vec<Option<Vec<f64>>>,
    data: Arc<RunData>,
    progress: Progress,
    enqueued: Duration,
    /// The folder that checkpoints are saved to, where the run has taken it.
    run: Option<RunShare>,
    first_times: FirstTimes,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Training samples read.
    pub consumed_samples: u64,
    /// Steps of those that changed nothing: gradients that overflowed, or were above the threshold.
    #[serde(default)]
    pub skipped_steps: u64,
    /// The samples of those, over which schedules did not move on.
    #[serde(default)]
    pub skipped_samples: u64,
}

impl Trainer {
    /// A model that has learnt nothing here: freshly drawn, or what `model.init` names (if that is
    /// set and the run has a checkpoint, [`resume`](Self::resume) loads the weights). `groups` decides
    /// the layout; the one in `config` is not looked at.
    ///
    /// # Errors
    /// The layout does not split the model or the batch, or the data is shorter than one sample.
    /// # Collective
    /// Nothing is sent.
    pub fn new(
        config: Arc<TrainConfig>,
        groups: ProcessGroups,
        device: Device,
        data: Arc<RunData>,
    ) -> Result<Self, TrainError> {
        let start = config.start(false)?;
        Self::starting_from(start.as_ref(), config, groups, device, data)
    }

    /// [`new`](Self::new) from an opened model.
    pub(crate) fn starting_from(
        start: Option<&InitFrom>,
        config: Arc<TrainConfig>,
        groups: ProcessGroups,
        device: Device,
        data: Arc<RunData>,
    ) -> Result<Self, TrainError> {
        let layout = groups.layout();
        let model_config = config.check_start(&layout, start, &data)?;
        let (train, valid) = data.samplers(&config)?;
        let pipeline = Pipeline::new(&config.parallel, &model_config, config.train.dtype, &groups)?;
        let model = model_config
            .init_stages(pipeline.chunks(), &groups, layout.sp, &device)?
            .with_moe_options(config.moe.options())
            .with_fused_linear_cross_entropy(config.train.fused_linear_cross_entropy)
            .with_recompute(config.recompute.of_model())
            .with_dropout(config.train.dropout())?
            .with_context_parallel(&groups.cp, &config.context_comms(&layout, &model_config)?)?;
        let plan = shard_plan(&model).map_err(megaburn_models::ModelError::from)?;
        let main_grads = main_grads(&model);
        let vector_grads = vector_grads(&model);
        let direct = main_grads.keys().cloned();
        let chunks = plan
            .iter()
            .map(|(path, _)| (path.to_string(), model.chunk_of(path)));
        let sharding = config
            .parallel
            .sharding()
            .with_direct(direct)
            .with_cross_stage(pipeline.shared());
        let sharding = sharding
            .with_chunks(chunks)
            .with_experts(experts(&plan))
            .init(&model, &groups)?;
        sharding.attach(&main_grads, config.parallel.overlap);
        let dynamic = HybridContext::new(&config, &model_config, &groups)?;
        let dtype = config.train.dtype;
        let optimizer = config.optimizer.init(dtype, &sharding, &groups)?;
        let mut optimizer = optimizer.with_f32_params(model.f32_params());
        let model = match start {
            Some(InitFrom::Init(source)) => optimizer
                .load_params(model, dtype.into(), |path, _| {
                    groups.world.pulse().beat();
                    source.local(path, &plan)
                })
                .map_err(TrainError::from)?,
            Some(InitFrom::Resumed(_)) | None => optimizer.cast_params(model, dtype.into()),
        };
        let grads = GradientAccumulator::new(&model, &plan, &sharding)?
            .with_dtype(config.optimizer.main_grads_dtype.into())?
            .with_main_grads(main_grads)
            .with_vector_grads(vector_grads);
        Ok(Self {
            grads,
            sharding,
            optimizer,
            schedules: Schedules::of(&config)?,
            loss_scaler: match dtype {
                Dtype::F16 => Some(LossScaler::new(config.optimizer.scaling())?),
                Dtype::F32 | Dtype::Bf16 => None,
            },
            consecutive_skips: 0,
            train,
            valid,
            batch: GlobalBatch::new(
                config.train.global_batch,
                config.train.micro_batch,
                layout.dp,
            )?,
            last_load: vec![None; model_config.num_blocks()],
            model: Some(model),
            plan,
            model_config,
            dynamic,
            groups,
            pipeline,
            device,
            data,
            progress: Progress::default(),
            enqueued: Duration::ZERO,
            run: None,
            first_times: FirstTimes::default(),
            config,
        })
    }

    /// Saves to the run's folder, and only as long as it is the run's.
    pub(crate) fn in_run(self, run: RunShare) -> Self {
        Self {
            run: Some(run),
            ..self
        }
    }

    /// Says whether this rank compiles kernels, as on GPUs.
    pub(crate) fn compiling(self, compiles: bool) -> Self {
        Self {
            first_times: FirstTimes::new(compiles),
            ..self
        }
    }

    /// How long the host took over the last step before it waited for its loss: on a GPU, for
    /// enqueueing it.
    pub fn enqueue_time(&self) -> Duration {
        self.enqueued
    }

    /// How far the run has come.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// How the run is split over ranks.
    pub(crate) fn layout(&self) -> Layout {
        self.groups.layout()
    }

    pub(crate) fn model_config(&self) -> &DecoderConfig {
        &self.model_config
    }

    /// The batch of the next step.
    fn next_batch(&self) -> GlobalBatch {
        let samples = self
            .schedules
            .batch
            .batch_size(self.progress.consumed_samples);
        let micro = self.batch.micro_batch_size();
        let dp = self.batch.dp();
        GlobalBatch::new(samples, micro, dp).expect("every batch was checked")
    }

    /// Whether there is data to evaluate on.
    pub(crate) fn evaluates(&self) -> bool {
        self.valid.is_some()
    }

    /// Whether all steps are done.
    pub(crate) fn is_finished(&self) -> bool {
        self.progress.step >= self.config.train.steps
    }

    /// This rank's part of the model. With `parallel.zero = 3` its matrices are no numbers: a rank keeps a
    /// share of them, and all ranks that share must compute with it, or [save](Self::save) it, together.
    pub fn model(&self) -> &Decoder {
        self.sharding.settle();
        self.model_in_flight()
    }

    /// This rank's part of the model with all values, to be read.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// With `parallel.zero = 3` all data-parallel ranks; their memory holds the model then.
    pub fn full_model(&self) -> Result<Decoder, TrainError> {
        Ok(self.sharding.whole(self.model_in_flight().clone())?)
    }

    /// The same as [`model`](Self::model), parameters of which may be on their way yet: to compute with, layer by layer.
    fn model_in_flight(&self) -> &Decoder {
        self.model
            .as_ref()
            .expect("the model is only away during an update")
    }

    /// The optimizer, with the count of its steps.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Which part of each parameter that is.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// Folder of the checkpoints.
    fn checkpoints(&self) -> PathBuf {
        PathBuf::from(&self.config.run.dir).join(CHECKPOINTS)
    }
}

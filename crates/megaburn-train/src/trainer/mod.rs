//! The trainer of one rank.

mod access;
mod amax_histories;
mod batch;
mod collator;
mod conversions;
mod delayed_scales;
#[cfg(test)]
mod estimated;
mod evaluate;
mod experts;
mod fp8_params;
mod hybrid_context;
mod in_run;
mod inputs;
mod masked_row;
#[cfg(test)]
mod narrow_state;
mod nonfinite_origin;
mod packed_row;
mod pair_rows;
mod passes;
mod precision_fallback;
mod precision_phases;
mod precision_state;
mod qk_clip;
mod quantization_counts;
mod resume;
mod resume_samples;
mod sample;
mod save;
mod stats;
mod step;
#[cfg(test)]
pub(crate) mod testing;
mod update;

use std::{sync::Arc, time::Duration};

use burn::prelude::Device;
use megaburn_collective::ProcessGroups;
use megaburn_data::Sample;
use megaburn_models::{Decoder, DecoderConfig};

use crate::{
    config::{InitFrom, TrainConfig},
    data::{RunData, RunSamples, SourceReading},
    error::TrainError,
    train_state::TrainStateConfig,
    trainer_core::{Progress, Schedules, TrainerCore},
};
use amax_histories::AmaxHistories;
use hybrid_context::HybridContext;
use precision_state::PrecisionState;

pub(crate) use amax_histories::SavedAmaxes;
pub use conversions::{Conversions, LossScaleConversion};
pub use delayed_scales::ResumedAmaxes;
pub(crate) use resume::{changes_since, check_model, read_state};
pub(crate) use resume_samples::{Reading, check_reading};
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
    pub(crate) core: TrainerCore<Decoder>,
    model_config: DecoderConfig,
    /// The assignment of documents to ranks, with hybrid context parallelism.
    hybrid: Option<HybridContext>,
    samples: RunSamples,
    /// The samples of this rank's micro-batches in the step, if they were read before it.
    step_samples: Vec<Vec<Sample>>,
    /// For each layer of the full model, each expert's share of the last batch's tokens.
    last_load: Vec<Option<Vec<f64>>>,
    /// The largest magnitudes of the steps before, with delayed scaling.
    amax_histories: AmaxHistories,
    /// The factor of the loss in the current step's gradients.
    loss_factor: f64,
    /// The precision of layers, which may change from step to step.
    precision: PrecisionState,
    data: Arc<RunData>,
    /// The program whose checkpoint the run was made from, if it was.
    imported: Option<ImportedFrom>,
}

impl Trainer {
    /// A trainer at step 0. Its model is freshly initialized, or the one that `model.init` names.
    /// (If `model.init` is set and the run has a checkpoint, [`resume`](Self::resume) loads the
    /// weights.) `groups` determines the layout; the one in `config` is ignored.
    ///
    /// # Errors
    /// The layout does not split the model or the batch, the data is shorter than one sample, or the
    /// device cannot compute in `train.dtype`.
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
        let state = TrainStateConfig {
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
        let schedules = Schedules::of(&config)?;
        let trainer = Self {
            samples,
            step_samples: Vec::new(),
            last_load: vec![None; model_config.num_blocks()],
            amax_histories: AmaxHistories::new(&config.precision),
            loss_factor: 1.0,
            precision: PrecisionState::new(&config.precision),
            model_config,
            hybrid,
            data,
            imported: None,
            core: TrainerCore::new(config, groups, device, schedules, state)?,
        };
        trainer.begin_first_phase();
        Ok(trainer)
    }

    /// How long the host worked on the last step before it waited for the loss: on a GPU, the time
    /// for enqueueing the step.
    pub fn enqueue_time(&self) -> Duration {
        self.core.enqueued
    }

    /// The progress of the run.
    pub fn progress(&self) -> Progress {
        self.core.progress
    }

    /// How the run reads each training data set; empty in Megatron-LM's order.
    pub(crate) fn reading(&self) -> &[SourceReading] {
        &self.samples.reading
    }

    /// Asks for the samples of the next two steps, if samples are read ahead.
    fn read_ahead(&self) {
        let Some(ahead) = &self.samples.read_ahead else {
            return;
        };
        let mut consumed = self.core.progress.consumed_samples;
        let left = self
            .core
            .config
            .train
            .steps
            .saturating_sub(self.core.progress.step);
        let steps = (0..left.min(2)).flat_map(|_| {
            let batch = self.core.batch_after(consumed);
            let first = consumed;
            consumed += batch.global_batch_size() as u64;
            match self.hybrid {
                Some(_) => first..consumed,
                None => batch.rank(first, self.core.groups.dp.rank()),
            }
        });
        ahead.request(steps);
    }

    /// Compares the copies of weights, masters, moments and the last step's gradients that several
    /// ranks hold:
    ///
    /// - data-parallel replicas: all parameters except experts, whose copies are along EDP;
    /// - tensor-parallel ranks: norms, biases and replicated heads;
    /// - the stages of a pipeline: a tied embedding, and relative biases.
    ///
    /// All copies get the same updates and stay bit-identical, unless hardware fails. Of what ZeRO
    /// shards, tensor-parallel ranks have copies, and so have ranks of other
    /// `parallel.zero_ranks` groups. After a step that was skipped, gradients are not compared.
    ///
    /// Source: Megatron-LM `--check-weight-hash-across-dp-replicas-interval`, which compares weights.
    ///
    /// # Errors
    /// Two ranks differ (the error names the tensor), or a device cannot be read.
    /// # Collective
    /// All ranks; a hash of each range of each tensor goes to rank 0.
    pub fn check_replicas(&self) -> Result<(), TrainError> {
        self.core.check_replicas()
    }
}

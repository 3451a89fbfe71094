//! Tries configurations that differ in layout and settings: whether they fit, and how fast they are.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_pipeline::{PreparedSchedule, ScheduleConfig, ScheduleKind, Stages};
use megaburn_train::{TrainConfig, config::RecomputeConfig, estimate::PartParams};

use crate::{
    error::PlanError,
    gpu::Gpu,
    machine::Machine,
    memory::{Held, StageMemory},
    params::StageParams,
    pipeline::{NANOSECONDS, Pipeline},
    plan::flops,
    rank::Rank,
    step::{StepTime, bubble_fraction},
};

/// A step with more micro-batches for each rank of a pipeline than twice this number is not simulated:
/// its time follows from those of two shorter steps, in which the pipeline fills and empties alike.
const SIMULATED: usize = 4;

/// A run that fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trial {
    /// Memory of the fullest stage.
    pub(crate) total_bytes: usize,
    /// Time of a step.
    pub(crate) step_ms: f64,
}

/// A run as its plan describes it.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) memory: Vec<StageMemory>,
    pub(crate) time: StepTime,
    pub(crate) bubble_fraction: f64,
    /// FLOPs of a step over all ranks.
    pub(crate) flops: f64,
}

/// Why a configuration is left out.
#[derive(Debug)]
pub(crate) enum Cut {
    /// It cannot be run at all.
    Refused(PlanError),
    /// A stage has less headroom than asked for.
    DoesNotFit,
}

impl<E: Into<PlanError>> From<E> for Cut {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// What the parameters of the ranks depend on: tp, ep and etp, and how layers are divided.
type ParamsKey = ([usize; 3], Stages);

/// A model as a layout pads it, and the parameters of the rank of each stage.
pub(crate) type Known = (DecoderConfig, StageParams);

/// What the ranks hold for their micro-batches depends on: the layout without dp and ep, the
/// micro-batch, the fused loss, recomputation and the schedule.
type HeldKey = (Layout, usize, bool, RecomputeConfig, ScheduleConfig);

/// Tries configurations of one model, which may be tried by several threads.
#[derive(Debug)]
pub(crate) struct Trials {
    pub(crate) gpu: Gpu,
    /// The least headroom of every stage.
    pub(crate) headroom_bytes: i64,
    parts: Mutex<PartParams>,
    params: Mutex<HashMap<ParamsKey, Arc<Known>>>,
    held: Mutex<HashMap<HeldKey, Arc<Vec<Held>>>>,
    schedules: Mutex<HashMap<ScheduleConfig, Arc<PreparedSchedule>>>,
    simulated: AtomicUsize,
}

impl Trials {
    pub(crate) fn new(gpu: Gpu, headroom_bytes: i64) -> Self {
        Self {
            gpu,
            headroom_bytes,
            parts: Mutex::default(),
            params: Mutex::default(),
            held: Mutex::default(),
            schedules: Mutex::default(),
            simulated: AtomicUsize::new(0),
        }
    }

    /// The number of steps that were simulated.
    pub(crate) fn simulated(&self) -> usize {
        self.simulated.load(Ordering::Relaxed)
    }

    /// The memory and the time of a valid configuration with this layout, as its plan has them: the
    /// whole step is simulated.
    pub(crate) fn plan(&self, config: &TrainConfig, layout: Layout) -> Result<Planned, PlanError> {
        let known = self.known(config, &layout)?;
        let (model, params) = &*known;
        let rank = Rank::new(config, model, layout, Machine::new(self.gpu, config)?)?;
        let held = self.schedule(rank.schedule(rank.micro_batches_held()))?;
        let memory = rank.memory(params, &rank.held(&held)?);
        let pipeline = rank.pipeline();
        let nanoseconds = self.makespan(&rank, &pipeline, rank.micro_batches)?;
        let seconds = nanoseconds / NANOSECONDS;
        let time = rank.time(&pipeline, params, &memory, seconds);
        Ok(Planned {
            bubble_fraction: bubble_fraction(&time, seconds),
            flops: flops(config, model),
            memory,
            time,
        })
    }

    /// Nanoseconds of a step of this number of micro-batches.
    pub(crate) fn makespan(
        &self,
        rank: &Rank<'_>,
        pipeline: &Pipeline,
        micro_batches: usize,
    ) -> Result<f64, PlanError> {
        self.simulated.fetch_add(1, Ordering::Relaxed);
        let schedule = self.schedule(rank.schedule(micro_batches))?;
        Ok(schedule.makespan(&pipeline.costs)? as f64)
    }

    /// The model and the parameters of each stage in a valid configuration with this layout.
    pub(crate) fn known(
        &self,
        config: &TrainConfig,
        layout: &Layout,
    ) -> Result<Arc<Known>, PlanError> {
        let stages = config.parallel.schedule(layout.pp, 1).stages();
        let key = ([layout.tp, layout.ep, layout.etp], stages);
        cached(&self.params, key, || {
            let model = config.planned_model(layout)?;
            let params = locked(&self.parts).of_stages(config, layout, &model)?;
            Ok((model, StageParams::new(params)))
        })
    }

    /// What the rank of each stage holds for its micro-batches.
    pub(crate) fn held(
        &self,
        rank: &Rank<'_>,
        schedule: &ScheduleConfig,
    ) -> Result<Arc<Vec<Held>>, PlanError> {
        let layout = Layout {
            dp: 1,
            ep: 1,
            ..rank.layout
        };
        let TrainConfig {
            train, recompute, ..
        } = rank.config;
        let (micro_batch, fused_loss) = (train.micro_batch, train.fused_linear_cross_entropy);
        let key = (
            layout,
            micro_batch,
            fused_loss,
            recompute.clone(),
            schedule.clone(),
        );
        cached(&self.held, key, || {
            rank.held(&*self.schedule(schedule.clone())?)
        })
    }

    fn schedule(&self, schedule: ScheduleConfig) -> Result<Arc<PreparedSchedule>, PlanError> {
        cached(
            &self.schedules,
            schedule.clone(),
            || Ok(schedule.prepare()?),
        )
    }
}

/// The number of micro-batches of a step that is as full as that of this rank.
pub(crate) fn shortened(rank: &Rank<'_>) -> usize {
    let all = rank.micro_batches;
    let short = SIMULATED * rank.layout.pp;
    // In gpipe more micro-batches hold more activations.
    let has_all_at_once = rank.schedule(1).kind == ScheduleKind::GPipe;
    let is_whole = rank.config.parallel.max_tokens_per_rank.is_some() || has_all_at_once;
    if is_whole || all <= 2 * short {
        all
    } else {
        short
    }
}

/// The known value, or the one that is made. Two threads may make the same one at once.
fn cached<K: Eq + Hash, V>(
    all: &Mutex<HashMap<K, Arc<V>>>,
    key: K,
    make: impl FnOnce() -> Result<V, PlanError>,
) -> Result<Arc<V>, PlanError> {
    if let Some(known) = locked(all).get(&key) {
        return Ok(known.clone());
    }
    let made = Arc::new(make()?);
    Ok(locked(all).entry(key).or_insert(made).clone())
}

/// What a lock holds. A thread that panics leaves no half-written value.
pub(crate) fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `config` with the degrees of `layout`.
pub(crate) fn of_layout(config: &TrainConfig, layout: Layout) -> TrainConfig {
    let mut config = config.clone();
    set_layout(&mut config, layout);
    config
}

/// Replaces the degrees of a configuration.
pub(crate) fn set_layout(config: &mut TrainConfig, layout: Layout) {
    let parallel = &mut config.parallel;
    parallel.ranks = Some(layout.world_size());
    (parallel.tp, parallel.dp) = (Some(layout.tp), Some(layout.dp));
    (parallel.cp, parallel.pp, parallel.sp) = (layout.cp, layout.pp, Some(layout.sp));
    (parallel.ep, parallel.etp) = (layout.ep, layout.etp);
}

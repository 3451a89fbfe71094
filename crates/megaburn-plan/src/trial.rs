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
use megaburn_train::{TrainConfig, estimate::RankParams};

use crate::{
    error::PlanError,
    gpu::Gpu,
    machine::Machine,
    memory::StageMemory,
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
type Known = (DecoderConfig, Vec<RankParams>);

/// Tries configurations of one model, which may be tried by several threads.
#[derive(Debug)]
pub(crate) struct Trials {
    gpu: Gpu,
    /// The least headroom of every stage.
    headroom_bytes: i64,
    params: Mutex<HashMap<ParamsKey, Arc<Known>>>,
    schedules: Mutex<HashMap<ScheduleConfig, Arc<PreparedSchedule>>>,
    simulated: AtomicUsize,
}

/// A run that fits, with the rank of each of its stages.
struct Fitting<'a> {
    rank: Rank<'a>,
    params: &'a [RankParams],
    memory: Vec<StageMemory>,
}

impl Trials {
    pub(crate) fn new(gpu: Gpu, headroom_bytes: i64) -> Self {
        Self {
            gpu,
            headroom_bytes,
            params: Mutex::default(),
            schedules: Mutex::default(),
            simulated: AtomicUsize::new(0),
        }
    }

    /// The number of steps that were simulated.
    pub(crate) fn simulated(&self) -> usize {
        self.simulated.load(Ordering::Relaxed)
    }

    /// The run of `config`, whose degrees are replaced by those of `layout`.
    pub(crate) fn run(&self, config: &TrainConfig, layout: Layout) -> Result<Trial, Cut> {
        let mut config = config.clone();
        set_layout(&mut config, layout);
        config.validate()?;
        self.time(&config)
    }

    /// The least milliseconds of a step of a valid configuration with its layout, whatever its
    /// schedule loses, if it fits. Nothing is simulated.
    pub(crate) fn fit(&self, config: &TrainConfig) -> Result<f64, Cut> {
        self.fitting(config, |fitting| {
            let pipeline = fitting.rank.pipeline()?;
            let micro_batches = fitting.rank.micro_batches;
            let is_split = fitting.rank.schedule(1).kind.splits_backward();
            let least = pipeline.least(micro_batches, is_split);
            Ok(fitting.time(&pipeline, least as f64).step_ms)
        })
    }

    /// The run of a valid configuration with its layout.
    pub(crate) fn time(&self, config: &TrainConfig) -> Result<Trial, Cut> {
        self.fitting(config, |fitting| {
            let pipeline = fitting.rank.pipeline()?;
            let makespan = |micro_batches| self.makespan(&fitting.rank, &pipeline, micro_batches);
            let all = fitting.rank.micro_batches;
            let short = shortened(&fitting.rank);
            let first = makespan(short)?;
            let nanoseconds = if short < all {
                let more = makespan(2 * short)? - first;
                first + (all - short) as f64 / short as f64 * more
            } else {
                first
            };
            let time = fitting.time(&pipeline, nanoseconds);
            let totals = fitting.memory.iter().map(|memory| memory.total_bytes);
            Ok(Trial {
                total_bytes: totals.max().unwrap_or(0),
                step_ms: time.step_ms,
            })
        })
    }

    /// The memory and the time of a valid configuration with its layout, as its plan has them: the
    /// whole step is simulated.
    pub(crate) fn plan(&self, config: &TrainConfig) -> Result<Planned, PlanError> {
        let layout = config.layout(None)?;
        let model = config.planned_model(&layout)?;
        let known = self.known(config, &layout)?;
        let rank = Rank::new(config, &model, layout, Machine::new(self.gpu, config)?)?;
        let held = self.schedule(rank.schedule(rank.micro_batches_held()))?;
        let memory = rank.memory(&known.1, &held)?;
        let pipeline = rank.pipeline()?;
        let nanoseconds = self.makespan(&rank, &pipeline, rank.micro_batches)?;
        let seconds = nanoseconds / NANOSECONDS;
        let time = rank.time(&pipeline, &known.1, &memory, seconds);
        Ok(Planned {
            bubble_fraction: bubble_fraction(&time, seconds),
            flops: flops(config, &model),
            memory,
            time,
        })
    }

    /// Nanoseconds of a step of this number of micro-batches.
    fn makespan(
        &self,
        rank: &Rank<'_>,
        pipeline: &Pipeline,
        micro_batches: usize,
    ) -> Result<f64, PlanError> {
        self.simulated.fetch_add(1, Ordering::Relaxed);
        let schedule = self.schedule(rank.schedule(micro_batches))?;
        Ok(schedule.makespan(&pipeline.costs)? as f64)
    }

    /// What `of` makes of a valid configuration with its layout, if it fits.
    fn fitting<T>(
        &self,
        config: &TrainConfig,
        of: impl FnOnce(&Fitting<'_>) -> Result<T, Cut>,
    ) -> Result<T, Cut> {
        let layout = config.layout(None)?;
        let known = self.known(config, &layout)?;
        let (model, params) = &*known;
        let rank = Rank::new(config, model, layout, Machine::new(self.gpu, config)?)?;
        rank.schedule(rank.micro_batches).check()?;
        let held = match rank.config.parallel.max_tokens_per_rank {
            Some(_) => rank.micro_batches_held(),
            None => shortened(&rank),
        };
        let schedule = self.schedule(rank.schedule(held))?;
        let memory = rank.memory(params, &schedule)?;
        let fits = |memory: &StageMemory| memory.headroom_bytes >= self.headroom_bytes;
        if !memory.iter().all(fits) {
            return Err(Cut::DoesNotFit);
        }
        of(&Fitting {
            rank,
            params,
            memory,
        })
    }

    fn known(&self, config: &TrainConfig, layout: &Layout) -> Result<Arc<Known>, PlanError> {
        let stages = config.parallel.schedule(layout.pp, 1).stages();
        let key = ([layout.tp, layout.ep, layout.etp], stages);
        cached(&self.params, key, || {
            let model = config.planned_model(layout)?;
            let params = RankParams::of_stages(config, layout, &model)?;
            Ok((model, params))
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

impl Fitting<'_> {
    /// The time of a step whose pipeline takes this number of nanoseconds.
    fn time(&self, pipeline: &Pipeline, nanoseconds: f64) -> StepTime {
        let seconds = nanoseconds / NANOSECONDS;
        self.rank.time(pipeline, self.params, &self.memory, seconds)
    }
}

/// The number of micro-batches of a step that is as full as that of this rank.
fn shortened(rank: &Rank<'_>) -> usize {
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

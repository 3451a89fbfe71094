//! Tries configurations that differ in layout and settings: whether they fit, and how fast they are.

use std::collections::{HashMap, hash_map::Entry};

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_pipeline::ScheduleKind;
use megaburn_train::{TrainConfig, estimate::RankParams};

use crate::{error::PlanError, gpu::Gpu, machine::Machine, memory::StageMemory, rank::Rank};

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
    /// The part of it in which stages wait for others.
    pub(crate) bubble_ms: f64,
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

/// What the parameters of the ranks depend on: tp, pp, ep, etp, and how stages are divided into
/// chunks.
type ParamsKey = ([usize; 4], Option<ScheduleKind>, Option<usize>);

/// Tries configurations of one model.
#[derive(Debug)]
pub(crate) struct Trials {
    gpu: Gpu,
    /// The least headroom of every stage.
    headroom_bytes: i64,
    params: HashMap<ParamsKey, (DecoderConfig, Vec<RankParams>)>,
}

impl Trials {
    pub(crate) fn new(gpu: Gpu, headroom_bytes: i64) -> Self {
        Self {
            gpu,
            headroom_bytes,
            params: HashMap::new(),
        }
    }

    /// The run of `config`, whose degrees are replaced by those of `layout`.
    pub(crate) fn run(&mut self, config: &TrainConfig, layout: Layout) -> Result<Trial, Cut> {
        let mut config = of_layout(config, layout);
        config.validate()?;
        let layout = config.layout(None)?;
        let Layout {
            tp, pp, ep, etp, ..
        } = layout;
        let parallel = &config.parallel;
        let key = ([tp, pp, ep, etp], parallel.schedule, parallel.chunks);
        let (model, params) = match self.params.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let model = config.planned_model(&layout)?;
                let params = RankParams::of_stages(&config, &layout, &model)?;
                unknown.insert((model, params))
            }
        };
        let machine = Machine::new(self.gpu, &config)?;
        let all = Rank::new(&config, model, layout, machine)?.micro_batches;
        let short = (SIMULATED * layout.pp).min(all);
        let is_short = config.parallel.max_tokens_per_rank.is_none() && 2 * short < all;
        let times: &[usize] = if is_short {
            &[short, 2 * short]
        } else {
            &[all]
        };
        let mut found = Vec::new();
        for num in times {
            if is_short {
                config.train.global_batch = config.train.micro_batch * layout.dp * num;
            }
            let rank = Rank::new(&config, model, layout, machine)?;
            let memory = rank.memory(params)?;
            let fits = |memory: &StageMemory| memory.headroom_bytes >= self.headroom_bytes;
            if !memory.iter().all(fits) {
                return Err(Cut::DoesNotFit);
            }
            let step = rank.step(params, &memory)?;
            let totals = memory.iter().map(|memory| memory.total_bytes);
            found.push(Trial {
                total_bytes: totals.max().unwrap_or(0),
                step_ms: step.time.step_ms,
                bubble_ms: step.time.bubble_ms,
            });
        }
        let first = found[0];
        let times = (all - short) as f64 / short as f64;
        let whole = |of: fn(&Trial) -> f64| {
            let more = found.get(1).map_or(0.0, |second| of(second) - of(&first));
            of(&first) + times * more
        };
        Ok(Trial {
            total_bytes: first.total_bytes,
            step_ms: whole(|trial| trial.step_ms),
            bubble_ms: whole(|trial| trial.bubble_ms),
        })
    }
}

/// `config` with the degrees of `layout`.
pub(crate) fn of_layout(config: &TrainConfig, layout: Layout) -> TrainConfig {
    let mut config = config.clone();
    let parallel = &mut config.parallel;
    parallel.ranks = Some(layout.world_size());
    (parallel.tp, parallel.dp) = (Some(layout.tp), Some(layout.dp));
    (parallel.cp, parallel.pp, parallel.sp) = (layout.cp, layout.pp, Some(layout.sp));
    (parallel.ep, parallel.etp) = (layout.ep, layout.etp);
    config
}

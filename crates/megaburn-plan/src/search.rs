//! The fastest layouts and settings of a run on a number of GPUs.

use std::collections::BTreeMap;

use megaburn_mesh::Layout;
use megaburn_train::TrainConfig;
use serde::Serialize;

use crate::{
    candidates::{Candidate, Recomputed, Settings, changed},
    changes::flags,
    error::PlanError,
    gpu::Gpu,
    plan::{Plan, PlanConfig},
    trial::{Cut, Trial, Trials, of_layout},
};

/// The share of a GPU's memory that a found run leaves free: planned memory is not exact.
pub const HEADROOM: f64 = 0.05;
/// How many times as many runs as asked for are planned in full, because long steps are
/// extrapolated before.
const PLANNED: usize = 3;

/// What to search: the fastest layouts and settings of a configuration on GPUs of one kind.
///
/// The model, the batch and the precision stay as they are. Layout, schedule and chunks of the
/// pipeline, micro-batch, ZeRO, recomputation and the fused loss are chosen.
#[derive(Clone, Debug)]
pub struct SearchConfig {
    config: TrainConfig,
    gpus: usize,
    gpu: Gpu,
    top: usize,
}

/// What a search found.
#[derive(Clone, Debug, Serialize)]
pub struct SearchResult {
    /// The number of GPUs, one for each rank.
    pub gpus: usize,
    /// The GPU.
    pub gpu: Gpu,
    /// Layouts with a micro-batch and a schedule that were tried.
    pub candidates: usize,
    /// Those of them that fit with some settings.
    pub fit: usize,
    /// Schedules that were left out, because their layout and micro-batch would be too slow even
    /// without a bubble.
    pub slower: usize,
    /// Those that leave less memory free than [`HEADROOM`] with any settings.
    pub do_not_fit: usize,
    /// Those that cannot be run, by the first reason.
    pub refused: Vec<Refused>,
    /// The fastest runs, the fastest first: one for each layout, micro-batch and schedule.
    pub best: Vec<FoundRun>,
}

/// Candidates that were refused for one kind of reason.
#[derive(Clone, Debug, Serialize)]
pub struct Refused {
    /// How many.
    pub count: usize,
    /// The error of the first.
    pub example: String,
}

/// A run that a search found.
#[derive(Clone, Debug, Serialize)]
pub struct FoundRun {
    /// The layout.
    pub layout: Layout,
    /// The settings that differ from the configuration's, as `--set` takes them.
    pub settings: Vec<String>,
    /// Both as flags of `megaburn train`.
    pub flags: String,
    /// Memory of the fullest stage.
    pub total_bytes: usize,
    /// Memory that is left on its GPU.
    pub headroom_bytes: i64,
    /// Time of a step.
    pub step_ms: f64,
    /// Tokens per second of each GPU.
    pub tokens_per_second_per_gpu: f64,
    /// The share of the GPU's peak in bf16.
    pub mfu: f64,
    /// The share of the passes' time in which the busiest stage waits for others.
    pub bubble_fraction: f64,
    /// The part of the step that takes the most time after products and attention.
    pub largest_loss: String,
    /// Its time.
    pub largest_loss_ms: f64,
}

/// The fastest settings of a candidate.
struct Fastest {
    trial: Trial,
    config: TrainConfig,
    recomputes: bool,
}

/// The time that a run must not exceed to be among the fastest.
struct Limit {
    most: usize,
    /// The fastest times so far, in order.
    times: Vec<f64>,
}

impl Limit {
    fn new(most: usize) -> Self {
        Self {
            most,
            times: Vec::new(),
        }
    }

    fn add(&mut self, ms: f64) {
        let at = self.times.partition_point(|time| *time < ms);
        self.times.insert(at, ms);
        self.times.truncate(self.most);
    }

    fn excludes(&self, ms: f64) -> bool {
        self.times.len() == self.most && self.times.last().is_some_and(|last| ms > *last)
    }
}

impl SearchConfig {
    /// A search for the five fastest runs on H100s.
    pub fn new(config: TrainConfig, gpus: usize) -> Self {
        Self {
            config,
            gpus,
            gpu: Gpu::H100,
            top: 5,
        }
    }

    /// Sets the GPU.
    pub fn with_gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = gpu;
        self
    }

    /// Sets how many runs are returned.
    pub fn with_top(mut self, top: usize) -> Self {
        self.top = top;
        self
    }

    /// Searches. Nothing is allocated and nothing is read.
    ///
    /// # Errors
    /// There is no GPU, or a run that was found cannot be planned.
    pub fn search(&self) -> Result<SearchResult, PlanError> {
        if self.gpus == 0 {
            return Err(PlanError::NoGpus);
        }
        let candidates = Candidate::all(&self.config, self.gpus, self.gpu)?;
        let headroom = (HEADROOM * self.gpu.memory_bytes as f64) as i64;
        let mut trials = Trials::new(self.gpu, headroom);
        let mut refused: BTreeMap<String, Refused> = BTreeMap::new();
        let mut fitting = Vec::new();
        let (mut do_not_fit, mut slower) = (0, 0);
        let mut limit = Limit::new(PLANNED * self.top);
        // The last layout and micro-batch, and the least time of a step with any schedule.
        let mut least: Option<(&Candidate, f64)> = None;
        for candidate in &candidates {
            let is_same = |(other, _): &(&Candidate, f64)| other.differs_in_schedule(candidate);
            if least
                .filter(is_same)
                .is_some_and(|(_, least_ms)| limit.excludes(least_ms))
            {
                slower += 1;
                continue;
            }
            match self.fastest(&mut trials, candidate) {
                Ok(Fastest {
                    trial,
                    config,
                    recomputes,
                }) => {
                    limit.add(trial.step_ms);
                    // With less recomputation another schedule could be faster by more than its bubble.
                    let least_ms = trial.step_ms - trial.bubble_ms;
                    least = (!recomputes).then_some((candidate, least_ms));
                    fitting.push((trial.step_ms, candidate.layout, config));
                }
                Err(Cut::DoesNotFit) => do_not_fit += 1,
                Err(Cut::Refused(error)) => {
                    let example = error.to_string();
                    let kind = example.chars().filter(|c| !c.is_ascii_digit()).collect();
                    let entry = refused.entry(kind);
                    entry.or_insert(Refused { count: 0, example }).count += 1;
                }
            }
        }
        let fit = fitting.len();
        fitting.sort_by(|one, other| one.0.total_cmp(&other.0));
        fitting.truncate(PLANNED * self.top);
        let found = fitting
            .into_iter()
            .map(|(_, layout, config)| self.found(layout, config));
        let mut best: Vec<FoundRun> = found.collect::<Result<_, _>>()?;
        best.sort_by(|one, other| one.step_ms.total_cmp(&other.step_ms));
        best.truncate(self.top);
        let mut refused: Vec<_> = refused.into_values().collect();
        refused.sort_by_key(|kind| std::cmp::Reverse(kind.count));
        Ok(SearchResult {
            gpus: self.gpus,
            gpu: self.gpu,
            candidates: candidates.len(),
            fit,
            slower,
            do_not_fit,
            refused,
            best,
        })
    }

    /// The fastest settings with which a candidate fits.
    fn fastest(&self, trials: &mut Trials, candidate: &Candidate) -> Result<Fastest, Cut> {
        let mut best: Option<Fastest> = None;
        for &zero in candidate.zeros() {
            'zero: for fused_loss in [false, true] {
                for recomputed in Recomputed::ALL {
                    let settings = Settings {
                        zero,
                        fused_loss,
                        recomputed,
                    };
                    let config = candidate.config(&self.config, settings);
                    let trial = match trials.run(&config, candidate.layout) {
                        Ok(trial) => trial,
                        Err(Cut::DoesNotFit) => continue,
                        // Other settings do not make the layout possible.
                        Err(Cut::Refused(error)) => match best {
                            Some(best) => return Ok(best),
                            None => return Err(Cut::Refused(error)),
                        },
                    };
                    let known = best.as_ref().map(|best| best.trial.step_ms);
                    if known.is_none_or(|known| trial.step_ms < known) {
                        best = Some(Fastest {
                            trial,
                            config,
                            recomputes: recomputed != Recomputed::Nothing,
                        });
                    }
                    // To recompute more is slower, and so is the fused loss where all logits fit.
                    if recomputed == Recomputed::Nothing {
                        break 'zero;
                    }
                    break;
                }
            }
        }
        best.ok_or(Cut::DoesNotFit)
    }

    fn found(&self, layout: Layout, config: TrainConfig) -> Result<FoundRun, PlanError> {
        let settings = changed(&self.config, &config);
        let config = of_layout(&config, layout);
        let plan = PlanConfig::new(config, layout).with_gpu(self.gpu).plan()?;
        let Plan {
            memory,
            time,
            tokens_per_second_per_gpu,
            mfu,
            bubble_fraction,
            ..
        } = &plan;
        let fullest = memory.iter().max_by_key(|stage| stage.total_bytes);
        let losses = time.parts().into_iter().skip(2);
        let (loss, loss_ms) = losses
            .max_by(|one, other| one.1.total_cmp(&other.1))
            .unwrap_or_default();
        Ok(FoundRun {
            layout,
            flags: flags(Some(layout), &settings),
            settings,
            total_bytes: fullest.map_or(0, |stage| stage.total_bytes),
            headroom_bytes: fullest.map_or(0, |stage| stage.headroom_bytes),
            step_ms: time.step_ms,
            tokens_per_second_per_gpu: *tokens_per_second_per_gpu,
            mfu: *mfu,
            bubble_fraction: *bubble_fraction,
            largest_loss: loss.to_string(),
            largest_loss_ms: loss_ms,
        })
    }
}

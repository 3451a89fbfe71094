//! The fastest layouts and settings of a run on a number of GPUs.

use std::collections::BTreeMap;

use megaburn_mesh::Layout;
use megaburn_train::TrainConfig;
use serde::Serialize;

use crate::{
    candidates::{Candidate, changed},
    changes::flags,
    error::PlanError,
    fastest, fitting,
    gpu::Gpu,
    plan::PlannedRun,
    trial::{Cut, Planned, Trials},
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
    tokens: Option<f64>,
    price: Option<f64>,
}

/// What a search found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SearchResult {
    /// The number of GPUs, one for each rank.
    pub gpus: usize,
    /// The GPU.
    pub gpu: Gpu,
    /// Layouts with a micro-batch and a schedule that were tried.
    pub candidates: usize,
    /// Those of them that fit with some settings, and whose step was simulated.
    pub fit: usize,
    /// Those that fit, but would be too slow even if their stages did not wait for each other more
    /// than any schedule makes them.
    pub slower: usize,
    /// Those that leave less memory free than [`HEADROOM`] with any settings.
    pub do_not_fit: usize,
    /// Those that cannot be run, by the first reason.
    pub refused: Vec<Refused>,
    /// How many steps were simulated.
    pub simulated: usize,
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
#[non_exhaustive]
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
    /// The whole run.
    pub run: PlannedRun,
}

impl SearchConfig {
    /// A search for the five fastest runs on H100s.
    pub fn new(config: TrainConfig, gpus: usize) -> Self {
        Self {
            config,
            gpus,
            gpu: Gpu::H100,
            top: 5,
            tokens: None,
            price: None,
        }
    }

    /// Sets the GPU.
    pub fn with_gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = gpu;
        self
    }

    /// Sets the number of tokens to train on. By default they are the tokens of `train.steps`.
    pub fn with_tokens(mut self, tokens: Option<f64>) -> Self {
        self.tokens = tokens;
        self
    }

    /// Sets the price of a GPU for an hour, in dollars.
    pub fn with_price(mut self, price: Option<f64>) -> Self {
        self.price = price;
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
        let trials = Trials::new(self.gpu, headroom);
        let (runs, cuts) = fitting::of(&self.config, &candidates, &trials);
        let mut refused: BTreeMap<String, Refused> = BTreeMap::new();
        let mut do_not_fit = 0;
        for cut in cuts {
            match cut {
                Cut::DoesNotFit => do_not_fit += 1,
                Cut::Refused(error) => {
                    let example = error.to_string();
                    let kind = example.chars().filter(|c| !c.is_ascii_digit()).collect();
                    let entry = refused.entry(kind);
                    entry.or_insert(Refused { count: 0, example }).count += 1;
                }
            }
        }
        let refusals: usize = refused.values().map(|kind| kind.count).sum();
        let fit = candidates.len() - do_not_fit - refusals;
        let fastest = fastest::of(&self.config, &candidates, runs, &trials, PLANNED * self.top)?;
        let (timed, simulated) = (fastest.len(), trials.simulated());
        let found = fastest
            .into_iter()
            .take(PLANNED * self.top)
            .map(|run| self.found(&trials, run.config(&self.config, &candidates)));
        let mut best: Vec<FoundRun> = found.collect::<Result<_, _>>()?;
        best.sort_by(|one, other| one.step_ms.total_cmp(&other.step_ms));
        best.truncate(self.top);
        let mut refused: Vec<_> = refused.into_values().collect();
        refused.sort_by_key(|kind| std::cmp::Reverse(kind.count));
        Ok(SearchResult {
            gpus: self.gpus,
            gpu: self.gpu,
            candidates: candidates.len(),
            fit: timed,
            slower: fit - timed,
            do_not_fit,
            refused,
            simulated,
            best,
        })
    }

    fn found(&self, trials: &Trials, config: TrainConfig) -> Result<FoundRun, PlanError> {
        let settings = changed(&self.config, &config);
        let layout = config.layout(None)?;
        let Planned {
            memory,
            time,
            bubble_fraction,
            flops,
        } = trials.plan(&config, layout)?;
        let fullest = memory.iter().max_by_key(|stage| stage.total_bytes);
        let losses = time.parts().into_iter().skip(2);
        let (loss, loss_ms) = losses
            .max_by(|one, other| one.1.total_cmp(&other.1))
            .unwrap_or_default();
        let seconds_of_all = self.gpus as f64 * time.step_ms / 1e3;
        Ok(FoundRun {
            layout,
            flags: flags(Some(layout), &settings),
            settings,
            total_bytes: fullest.map_or(0, |stage| stage.total_bytes),
            headroom_bytes: fullest.map_or(0, |stage| stage.headroom_bytes),
            step_ms: time.step_ms,
            tokens_per_second_per_gpu: config.tokens_per_step() as f64 / seconds_of_all,
            mfu: flops / seconds_of_all / self.gpu.bf16,
            bubble_fraction,
            largest_loss: loss.to_string(),
            largest_loss_ms: loss_ms,
            run: PlannedRun::new(&config, time.step_ms, self.gpus, [self.tokens, self.price]),
        })
    }
}

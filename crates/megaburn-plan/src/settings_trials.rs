//! Tries the settings of one layout that trade time for memory.

use megaburn_mesh::Layout;
use megaburn_models::decoder::Recompute;
use megaburn_pipeline::ScheduleConfig;
use megaburn_train::TrainConfig;

use crate::{
    error::PlanError,
    machine::Machine,
    memory::StageMemory,
    params::StageParams,
    pipeline::{NANOSECONDS, Pipeline},
    rank::Rank,
    trial::{Cut, Known, Trial, Trials, set_layout, shortened},
};

/// Tries settings of one layout with one micro-batch and one schedule: the stage of ZeRO, the fused
/// loss and the recomputation.
pub(crate) struct SettingsTrials<'a> {
    trials: &'a Trials,
    rank: Rank<'a>,
    params: &'a StageParams,
    /// A shorter schedule in which ranks hold as many activations as in the step's own.
    held: ScheduleConfig,
    /// What the ranks compute with and without the fused loss, for each kind of recomputation.
    pipelines: Vec<((bool, Recompute), Pipeline)>,
}

impl<'a> SettingsTrials<'a> {
    /// Settings of a valid configuration with this layout.
    pub(crate) fn new(
        trials: &'a Trials,
        config: &'a TrainConfig,
        layout: Layout,
        (model, params): &'a Known,
    ) -> Result<Self, PlanError> {
        let rank = Rank::new(config, model, layout, Machine::new(trials.gpu, config)?)?;
        rank.schedule(rank.micro_batches).check()?;
        let held = match config.parallel.max_tokens_per_rank {
            Some(_) => rank.micro_batches_held(),
            None => shortened(&rank),
        };
        Ok(Self {
            trials,
            held: rank.schedule(held),
            rank,
            params,
            pipelines: Vec::new(),
        })
    }

    /// The least milliseconds of a step of a configuration that differs in these settings only,
    /// whatever its schedule loses, if it fits. Nothing is simulated.
    pub(crate) fn fit(&mut self, config: &TrainConfig) -> Result<f64, Cut> {
        let rank = self.rank.with_config(config);
        let memory = self.memory(&rank)?;
        let is_split = rank.schedule(1).kind.splits_backward();
        let (params, micro_batches) = (self.params, rank.micro_batches);
        let pipeline = self.pipeline(&rank);
        let least = pipeline.least(micro_batches, is_split) as f64;
        let time = rank.time(pipeline, params, &memory, least / NANOSECONDS);
        Ok(time.step_ms)
    }

    /// The memory of each stage, if it fits.
    fn memory(&self, rank: &Rank<'_>) -> Result<Vec<StageMemory>, Cut> {
        let held = self.trials.held(rank, &self.held)?;
        let memory = rank.memory(self.params, &held);
        let least = self.trials.headroom_bytes;
        match memory.iter().all(|memory| memory.headroom_bytes >= least) {
            true => Ok(memory),
            false => Err(Cut::DoesNotFit),
        }
    }

    /// What the ranks compute, which does not depend on ZeRO.
    fn pipeline(&mut self, rank: &Rank<'_>) -> &Pipeline {
        let key = (rank.config.train.fused_linear_cross_entropy, rank.recompute);
        let known = self.pipelines.iter().position(|(known, _)| *known == key);
        let at = known.unwrap_or_else(|| {
            self.pipelines.push((key, rank.pipeline()));
            self.pipelines.len() - 1
        });
        &self.pipelines[at].1
    }
}

impl Trials {
    /// Tries the run of `config` with the degrees of `layout`.
    pub(crate) fn run(&self, config: &TrainConfig, layout: Layout) -> Result<Trial, Cut> {
        let mut config = config.clone();
        set_layout(&mut config, layout);
        config.validate()?;
        self.time(&config, config.layout(None)?)
    }

    /// The run of a valid configuration with this layout.
    pub(crate) fn time(&self, config: &TrainConfig, layout: Layout) -> Result<Trial, Cut> {
        let known = self.known(config, &layout)?;
        let settings = SettingsTrials::new(self, config, layout, &known)?;
        let rank = &settings.rank;
        let memory = settings.memory(rank)?;
        let pipeline = rank.pipeline();
        let makespan = |micro_batches| self.makespan(rank, &pipeline, micro_batches);
        let all = rank.micro_batches;
        let short = shortened(rank);
        let first = makespan(short)?;
        let nanoseconds = if short < all {
            let more = makespan(2 * short)? - first;
            first + (all - short) as f64 / short as f64 * more
        } else {
            first
        };
        let time = rank.time(
            &pipeline,
            settings.params,
            &memory,
            nanoseconds / NANOSECONDS,
        );
        let totals = memory.iter().map(|memory| memory.total_bytes);
        Ok(Trial {
            total_bytes: totals.max().unwrap_or(0),
            step_ms: time.step_ms,
        })
    }
}

//! A plan of a run: its memory, traffic and time.

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_pipeline::{Schedule, Timing};
use megaburn_train::{
    TrainConfig,
    config::{OptimizerName, Tokenizer},
    estimate::RankParams,
};
use serde::Serialize;

use crate::{
    changes::{self, Change},
    error::PlanError,
    gpu::Gpu,
    machine::Machine,
    memory::StageMemory,
    params::StageParams,
    rank::Rank,
    step::StepTime,
    traffic::Traffic,
};

/// What to plan: a configuration and its layout on GPUs of one kind.
///
/// ```
/// use megaburn_plan::{Gpu, PlanConfig};
/// use megaburn_train::ConfigLayers;
///
/// let config = ConfigLayers::new()
///     .with_set("train.dtype=bf16")?
///     .with_layout("tp2-dp2-sp")?
///     .load()?;
/// let layout = config.layout(None)?;
/// let plan = PlanConfig::new(config, layout).with_gpu(Gpu::H200).plan()?;
/// assert!(plan.fits && plan.time.step_ms > 0.0);
/// # Ok::<(), megaburn_plan::PlanError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PlanConfig {
    config: TrainConfig,
    layout: Layout,
    gpu: Gpu,
    tokens: Option<f64>,
    price: Option<f64>,
}

/// A plan of a run. Field names end in the unit of the number.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The model.
    pub model: PlannedModel,
    /// What a step trains on.
    pub batch: PlannedBatch,
    /// The layout.
    pub layout: Layout,
    /// The number of GPUs, one for each rank.
    pub gpus: usize,
    /// The GPU.
    pub gpu: Gpu,
    /// Whether the rank of every stage has enough memory.
    pub fits: bool,
    /// The memory of the rank of each pipeline stage.
    pub memory: Vec<StageMemory>,
    /// Changes that make the run fit on the same GPUs, the fastest first; empty if it fits.
    pub changes: Vec<Change>,
    /// What the rank of each pipeline stage sends in a step.
    pub traffic: Vec<Traffic>,
    /// The schedule of the pipeline.
    pub schedule: String,
    /// The share of the passes' time in which the busiest stage waits for others.
    pub bubble_fraction: f64,
    /// The time of a step.
    pub time: StepTime,
    /// Tokens per second of each GPU.
    pub tokens_per_second_per_gpu: f64,
    /// TFLOP/s of each GPU by Megatron-LM's formula.
    pub tflops_per_gpu: f64,
    /// These as a share of the GPU's peak in bf16.
    pub mfu: f64,
    /// The whole run.
    pub run: PlannedRun,
    /// What the numbers do not include.
    pub notes: Vec<String>,
    #[serde(skip)]
    pub(crate) drawn: (Schedule, Timing),
}

/// The model of a plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedModel {
    /// The name of the family.
    pub family: String,
    /// The number of parameters.
    pub parameters: usize,
    /// The sizes in words.
    pub sizes: String,
    /// The type that layers compute with.
    pub dtype: String,
    /// The recipe of products in FP8, or `bf16`.
    pub recipe: String,
}

/// What a step trains on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PlannedBatch {
    /// Tokens over all ranks.
    pub tokens: usize,
    /// Samples over all ranks.
    pub samples: usize,
    /// Tokens of a sample.
    pub tokens_per_sample: usize,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches on each data-parallel rank.
    pub micro_batches: usize,
}

/// The time and the cost of a whole run, without evaluations, checkpoints and failures.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PlannedRun {
    /// Tokens to train on.
    pub tokens: f64,
    /// Steps for these.
    pub steps: f64,
    /// Days.
    pub days: f64,
    /// Hours of all GPUs together.
    pub gpu_hours: f64,
    /// Their price.
    pub dollars: Option<f64>,
}

impl PlanConfig {
    /// A plan for H100s, of all steps of the configuration.
    pub fn new(config: TrainConfig, layout: Layout) -> Self {
        Self {
            config,
            layout,
            gpu: Gpu::H100,
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

    /// Makes the plan. Nothing is allocated and nothing is read.
    ///
    /// # Errors
    /// The layout does not split the model or the batch, or the GPU cannot compute in the precision
    /// of the configuration.
    pub fn plan(self) -> Result<Plan, PlanError> {
        let Self {
            config,
            layout,
            gpu,
            tokens,
            price,
        } = self;
        let model = config.planned_model(&layout)?;
        let rank = Rank::new(&config, &model, layout, Machine::new(gpu, &config)?)?;
        let params = StageParams::new(RankParams::of_stages(&config, &layout, &model)?);
        let prepared = rank.schedule(rank.micro_batches_held()).prepare()?;
        let memory = rank.memory(&params, &rank.held(&prepared)?);
        let step = rank.step(&params, &memory)?;
        let fits = memory.iter().all(StageMemory::fits);
        let changes = if fits {
            Vec::new()
        } else {
            changes::that_fit(&config, &layout, gpu)?
        };
        let gpus = layout.world_size();
        let batch = PlannedBatch {
            tokens: config.tokens_per_step(),
            samples: config.train.global_batch,
            tokens_per_sample: config.data.seq_lens().into_iter().sum(),
            micro_batch: config.train.micro_batch,
            micro_batches: rank.micro_batches,
        };
        let seconds = step.time.step_ms / 1e3;
        let flops = flops(&config, &model) / gpus as f64 / seconds;
        let run = PlannedRun::new(&config, step.time.step_ms, gpus, [tokens, price]);
        Ok(Plan {
            model: PlannedModel {
                family: model.family.to_string(),
                parameters: model
                    .whole_plan()
                    .map_err(megaburn_train::TrainError::from)?
                    .num_global(),
                sizes: model.summary(),
                dtype: config.train.dtype.to_string(),
                recipe: config.precision.recipe.to_string(),
            },
            batch,
            layout,
            gpus,
            gpu,
            fits,
            memory,
            changes,
            traffic: step.traffic,
            schedule: step.schedule.kind.to_string(),
            bubble_fraction: step.bubble,
            time: step.time,
            tokens_per_second_per_gpu: batch.tokens as f64 / gpus as f64 / seconds,
            tflops_per_gpu: flops / 1e12,
            mfu: flops / gpu.bf16,
            run,
            notes: notes(&config, &layout, gpu),
            drawn: (step.schedule, step.timing),
        })
    }
}

impl PlannedRun {
    /// A run of steps of `step_ms` on `gpus` GPUs: of this number of tokens, or of all steps of the
    /// configuration; with this price of a GPU for an hour.
    pub(crate) fn new(
        config: &TrainConfig,
        step_ms: f64,
        gpus: usize,
        [tokens, price]: [Option<f64>; 2],
    ) -> Self {
        let of_step = config.tokens_per_step() as f64;
        let tokens = tokens.unwrap_or(config.train.steps as f64 * of_step);
        let steps = tokens / of_step;
        let seconds = steps * (step_ms / 1e3);
        let gpu_hours = seconds / 3600.0 * gpus as f64;
        Self {
            tokens,
            steps,
            days: seconds / 86400.0,
            gpu_hours,
            dollars: price.map(|price| price * gpu_hours),
        }
    }
}

/// FLOPs of a step over all ranks, by Megatron-LM's formula.
pub(crate) fn flops(config: &TrainConfig, model: &DecoderConfig) -> f64 {
    let shape = model.flop_shape();
    let samples = config.train.global_batch;
    let seq_len = config.data.seq_len;
    if model.is_encoder_decoder() {
        shape.training_pairs(samples, [seq_len, config.data.decoder_seq_len])
    } else {
        shape.training(samples, seq_len)
    }
}

/// What the numbers do not include, for this configuration.
fn notes(config: &TrainConfig, layout: &Layout, gpu: Gpu) -> Vec<String> {
    let mut notes = Vec::new();
    if !gpu.is_measured {
        notes.push(format!(
            "no step was measured on an {}: it is assumed to reach the same shares of its peaks as an H100",
            gpu.title
        ));
    }
    if layout.world_size() > gpu.gpus_per_node {
        notes.push(format!(
            "no run over several servers was measured: {} GPUs share NVLink in each, and the network is \
            assumed to reach 80% of {:.0} GB/s for each GPU",
            gpu.gpus_per_node,
            gpu.network / 1e9
        ));
    }
    let is_unknown = config.model.vocab.is_none() && config.data.tokenizer != Tokenizer::Byte;
    if is_unknown {
        notes.push(
            "model.vocab is not set: the vocabulary is taken as that of bytes; set it to that of \
            data.tokenizer"
                .to_string(),
        );
    }
    if config.optimizer.name == OptimizerName::Muon {
        notes.push("the products of Muon's orthogonalisation are not counted".to_string());
    }
    if config.parallel.max_tokens_per_rank.is_some() || config.data.documents {
        notes.push(
            "documents are taken to fill sequences: attention between shorter ones takes less"
                .to_string(),
        );
    }
    notes
}

//! A small model of a program's own, and runs of it.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use burn::{
    module::Module,
    nn,
    prelude::Device,
    tensor::{DType, Tensor, TensorData, activation::gelu},
};
use megaburn::{
    mesh::Zigzag,
    parallel::{
        ParallelDropout, ParallelDropoutConfig, ReplicatedLinear, ReplicatedLinearConfig,
        TokenBlock, read_params,
    },
    prelude::*,
    report::metrics::StepMetrics,
    task::*,
    train::TrainError,
};
use megaburn_test_support::gather::{FullParams, LocalParams, gather};
use serde::{Deserialize, Serialize};

/// A residual MLP. The matrix `shared` reads the input and writes the output, so the first and the last
/// stage of a pipeline both hold it.
#[derive(Module, Sharded, Debug)]
pub(crate) struct Net {
    shared: Option<ReplicatedLinear>,
    blocks: Vec<Option<Block>>,
    #[sharded(replicated = group)]
    norm: Option<nn::LayerNorm>,
    #[module(skip)]
    group: Group,
}

#[derive(Module, Sharded, Debug)]
struct Block {
    up: ParallelLinear,
    down: ParallelLinear,
    dropout: ParallelDropout,
}

/// A micro-batch, `[1, samples, hidden]`, and its place in the run.
type Points = (Tensor<3>, Option<TokenBlock>);

impl Net {
    fn shared(&self, x: Tensor<3>) -> Tensor<3> {
        let shared = self.shared.as_ref().unwrap();
        shared.forward(x.cast(shared.weight.dtype()))
    }

    fn blocks(&self, blocks: Range<usize>, x: Tensor<3>, place: Option<TokenBlock>) -> Tensor<3> {
        let blocks = self.blocks[blocks].iter().flatten();
        blocks.fold(x, |x, Block { up, down, dropout }| {
            let y = down.forward(gelu(up.forward(x.clone())));
            x + dropout.forward(y, place)
        })
    }

    fn loss_of(&self, x: Tensor<3>, points: Tensor<3>) -> LossSum {
        let x = self.shared(self.norm.as_ref().unwrap().forward(x));
        // 1, but for points that are far away.
        let weight = points.clone().abs().max().clamp_min(1.0).reshape([1, 1, 1]);
        let error = (x.cast(DType::F32) - points.sin()) * weight;
        let num_samples = error.dims()[1];
        LossSum::new(error.clone().square().sum(), num_samples)
            .with_metric("absolute", error.abs().sum())
            .with_flops(1e6)
    }
}

impl TrainModel for Net {
    type Batch = Points;
    const METRICS: &'static [&'static str] = &["absolute"];

    fn loss(&self, (points, place): Points) -> LossSum {
        let x = self.shared(points.clone());
        self.loss_of(self.blocks(0..self.blocks.len(), x, place), points)
    }

    fn forward_stage(
        &self,
        stage: &Stage,
        input: Option<Tensor<3>>,
        (points, place): Points,
    ) -> StageOutput {
        let x = input.unwrap_or_else(|| self.shared(points.clone()));
        let x = self.blocks(stage.blocks.clone(), x, place);
        match stage.is_last {
            true => StageOutput::Loss(self.loss_of(x, points)),
            false => StageOutput::Stream(x),
        }
    }
}

/// The sections `[net]` and `[points]`.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub(crate) struct Config {
    net: NetConfig,
    points: PointsConfig,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(default)]
struct NetConfig {
    hidden: usize,
    blocks: usize,
    dropout: f64,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            hidden: 8,
            blocks: 4,
            dropout: 0.0,
        }
    }
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(default)]
struct PointsConfig {
    train: usize,
    validation: usize,
    /// The sample from which a point is NaN.
    nan: Option<usize>,
    /// The sample that is NaN when it is read for the first time.
    nan_once: Option<usize>,
    /// The number of a micro-batch, in the order of reading, whose points are far away.
    spike: Option<usize>,
    /// From `spike` on, every micro-batch whose points are far away, by the distance of their numbers.
    spike_every: Option<usize>,
}

impl Default for PointsConfig {
    fn default() -> Self {
        Self {
            train: 37,
            validation: 20,
            nan: None,
            nan_once: None,
            spike: None,
            spike_every: None,
        }
    }
}

/// The micro-batches whose points are far away.
#[derive(Clone, Copy)]
struct Spikes {
    first: usize,
    every: Option<usize>,
}

impl Spikes {
    fn has(self, number: usize) -> bool {
        match (number.checked_sub(self.first), self.every) {
            (Some(0), _) => true,
            (Some(after), Some(every)) => after.is_multiple_of(every),
            _ => false,
        }
    }
}

/// The task. Without blocks it names none of them, and has no pipeline.
#[derive(Clone, Copy)]
pub(crate) struct Waves {
    pub(crate) names_blocks: bool,
}

impl TrainTask for Waves {
    type Config = Config;
    type Model = Net;

    fn name(&self) -> String {
        "waves".into()
    }

    fn model(&self, config: &Config, at: &ModelPlace<'_>) -> Result<Net, TaskError> {
        let NetConfig {
            hidden,
            blocks,
            dropout,
        } = config.net;
        let is_end = at.is_first() || at.is_last();
        let shared = ReplicatedLinearConfig::new(hidden, hidden).with_name("shared");
        let block = |n| -> Result<Block, TaskError> {
            let up = ParallelLinearConfig::column(hidden, 12).with_name(format!("{n}.up"));
            let down = ParallelLinearConfig::row(12, hidden).with_name(format!("{n}.down"));
            let dropout = ParallelDropoutConfig::new(dropout, format!("{n}.dropout"));
            Ok(Block {
                dropout: dropout.init(at.tp(), Zigzag::WHOLE)?,
                up: up.init(at.tp(), at.device)?,
                down: down.init(at.tp(), at.device)?,
            })
        };
        let norm = || nn::LayerNormConfig::new(hidden).init(at.device);
        Ok(Net {
            shared: is_end
                .then(|| shared.init(at.tp(), at.device))
                .transpose()?,
            blocks: at.blocks(blocks, block)?,
            norm: at.is_last().then(norm),
            group: at.tp().clone(),
        })
    }

    fn data(&self, config: &Config) -> Result<TaskData<Points>, TaskError> {
        let hidden = config.net.hidden;
        let points =
            |first: usize, nan: Option<usize>, once: Option<usize>, spike: Option<Spikes>| {
                let was_read = AtomicBool::new(false);
                let reads = AtomicUsize::new(0);
                move |samples: &MicroBatch, device: &Device| {
                    let is_bad = once.is_some_and(|once| samples.contains(&once))
                        && !was_read.swap(true, Ordering::Relaxed);
                    let number = reads.fetch_add(1, Ordering::Relaxed);
                    let is_far = spike.is_some_and(|spike| spike.has(number));
                    let scale = if is_far { 1e3 } else { 1.0 };
                    let value = |sample: usize, at: usize| match nan {
                        Some(nan) if sample >= nan => f32::NAN,
                        _ if is_bad => f32::NAN,
                        _ => scale * ((first + sample) as f32 * 0.37 + at as f32 * 1.3).sin(),
                    };
                    let values: Vec<f32> = samples
                        .iter()
                        .flat_map(|sample| (0..hidden).map(move |at| value(*sample, at)))
                        .collect();
                    let values = TensorData::new(values, [1, samples.len(), hidden]);
                    (Tensor::from_data(values, device), samples.block)
                }
            };
        let PointsConfig {
            train,
            validation,
            nan,
            nan_once,
            spike,
            spike_every,
        } = config.points;
        let spike = spike.map(|first| Spikes {
            first,
            every: spike_every,
        });
        let data = TaskData::new(BatchFn::new(train, points(0, nan, nan_once, spike)));
        Ok(match validation {
            0 => data,
            _ => data.with_validation(BatchFn::new(validation, points(train, None, None, None))),
        })
    }

    fn pipeline(&self, config: &Config, micro_batch: usize) -> Option<PipelineSplit> {
        let NetConfig { hidden, blocks, .. } = config.net;
        let split = PipelineSplit::new(blocks, [1, micro_batch, hidden]);
        self.names_blocks.then(|| split.with_tied("shared.weight"))
    }
}

/// The task with blocks.
pub(crate) const WAVES: Waves = Waves { names_blocks: true };

const CONFIG: &str = "
[train]
steps = 6
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-2
warmup_steps = 0
";

/// The configuration with some keys set.
pub(crate) fn config(sets: &[&str]) -> Result<TaskConfig<Config>, TrainError> {
    let layers = TaskLayers::new().with_text("model.rs", CONFIG)?;
    let layers = sets
        .iter()
        .try_fold(layers, |layers, set| layers.with_set(set))?;
    layers.load("waves")
}

/// Runs `body` on each rank's trainer, and returns the results in rank order.
pub(crate) fn trainers<T: Send>(
    task: Waves,
    sets: &[&str],
    layout: &str,
    body: impl Fn(ModelTrainer<Waves>) -> Result<T, TrainError> + Sync,
) -> Vec<Result<T, String>> {
    let config = config(sets).unwrap();
    let data = Arc::new(task.data(&config.task).unwrap());
    let layout: Layout = layout.parse().unwrap();
    let options = GroupOptions {
        seed: config.run.run.seed,
        ..GroupOptions::default()
    };
    let ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        body(ModelTrainer::new(
            &task,
            config.clone(),
            groups,
            device,
            data.clone(),
        )?)
    });
    let text = |failure| format!("{failure}");
    ranks.into_iter().map(|rank| rank.map_err(text)).collect()
}

/// What a run has found.
pub(crate) struct Trained {
    pub(crate) steps: Vec<StepMetrics>,
    pub(crate) eval_loss: f64,
    pub(crate) params: FullParams,
}

/// Trains all steps under a layout.
pub(crate) fn train(sets: &[&str], layout: &str) -> Trained {
    let ranks = trainers(WAVES, sets, layout, |mut trainer| {
        let steps: Vec<StepMetrics> = (0..6).map(|_| trainer.step()).collect::<Result<_, _>>()?;
        let eval_loss = trainer.evaluate()?.eval_loss;
        Ok((steps, eval_loss, local_params(&trainer)?))
    });
    let mut found = None;
    let mut params = Vec::new();
    for rank in ranks {
        let (steps, eval_loss, local) = rank.unwrap();
        params.push(local);
        found.get_or_insert((steps, eval_loss));
    }
    let (steps, eval_loss) = found.unwrap();
    Trained {
        steps,
        eval_loss,
        params: gather(&params),
    }
}

/// The parameters of a rank.
pub(crate) fn local_params(trainer: &ModelTrainer<Waves>) -> Result<LocalParams, TrainError> {
    let spec = |path: &str| trainer.plan().get(path).unwrap().shard.clone();
    let params = read_params(&trainer.full_model()?).into_iter();
    Ok(params
        .map(|(path, data)| (path.clone(), data.iter::<f32>().collect(), spec(&path)))
        .collect())
}

//! A model of a program's own with the trainer of megaburn: tensor, pipeline and data parallelism,
//! ZeRO, checkpoints, resume, metrics and the command line.
//!
//! ```sh
//! cargo run --release --example own_model -- --layout tp2-pp2-dp2
//! ```

use std::{ops::Range, process::ExitCode};

use burn::{
    module::Module,
    prelude::Device,
    tensor::{DType, Tensor, TensorData, activation::gelu},
};
use megaburn::{parallel::Split, prelude::*, task::*};

/// A residual MLP that learns a function of points in the plane. `None` is what other stages of a
/// pipeline hold.
#[derive(Module, Sharded, Debug)]
struct Net {
    embed: Option<ParallelLinear>,
    blocks: Vec<Option<Block>>,
    head: Option<ParallelLinear>,
}

#[derive(Module, Sharded, Debug)]
struct Block {
    up: ParallelLinear,
    down: ParallelLinear,
}

impl Block {
    fn new(name: &str, hidden: usize, at: &ModelPlace<'_>) -> Result<Self, ParallelError> {
        let up = ParallelLinearConfig::column(hidden, 4 * hidden).with_name(format!("{name}.up"));
        let down = ParallelLinearConfig::row(4 * hidden, hidden).with_name(format!("{name}.down"));
        Ok(Self {
            up: up.init(at.tp(), at.device)?,
            down: down.init(at.tp(), at.device)?,
        })
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

impl Net {
    fn embed(&self, points: Tensor<3>) -> Tensor<3> {
        let embed = self.embed.as_ref().expect("the first stage");
        embed.forward(points.cast(embed.weight.dtype()))
    }

    fn blocks(&self, blocks: Range<usize>, x: Tensor<3>) -> Tensor<3> {
        let blocks = self.blocks[blocks].iter().flatten();
        blocks.fold(x, |x, block| block.forward(x))
    }

    fn error(&self, x: Tensor<3>, values: Tensor<3>) -> LossSum {
        let head = self.head.as_ref().expect("the last stage");
        let error = head.forward(x).cast(DType::F32) - values;
        LossSum::new(error.clone().square().sum(), error.dims()[1])
            .with_metric("absolute_error", error.abs().sum())
    }
}

impl TrainModel for Net {
    /// Points `[1, samples, 2]`, and the values there `[1, samples, 1]`.
    type Batch = (Tensor<3>, Tensor<3>);
    const METRICS: &'static [&'static str] = &["absolute_error"];

    fn loss(&self, (points, values): Self::Batch) -> LossSum {
        let x = self.embed(points);
        self.error(self.blocks(0..self.blocks.len(), x), values)
    }

    fn forward_stage(
        &self,
        stage: &Stage,
        input: Option<Tensor<3>>,
        (points, values): Self::Batch,
    ) -> StageOutput {
        let x = input.unwrap_or_else(|| self.embed(points));
        let x = self.blocks(stage.blocks.clone(), x);
        match stage.is_last {
            true => StageOutput::Loss(self.error(x, values)),
            false => StageOutput::Stream(x),
        }
    }
}

/// `sin(3 x) sin(3 y)` on points of the square from -1 to 1, the first of which has number `first`.
fn points(first: usize) -> impl Fn(&MicroBatch, &Device) -> (Tensor<3>, Tensor<3>) {
    move |samples, device| {
        let point = |sample: &usize| {
            let number = (first + sample) as f32;
            [0.754_877_7, 0.569_840_3].map(|step| 2.0 * (number * step).fract() - 1.0)
        };
        let points: Vec<f32> = samples.iter().flat_map(point).collect();
        let points = TensorData::new(points, [1, samples.len(), 2]);
        let points = Tensor::<3>::from_data(points, device);
        let values = (points.clone() * 3.0).sin().prod_dim(2);
        (points, values)
    }
}

/// The section `[net]` of a configuration.
#[derive(serde::Serialize, serde::Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct Config {
    net: NetConfig,
}

#[derive(serde::Serialize, serde::Deserialize, Clone, Debug)]
#[serde(default)]
struct NetConfig {
    hidden: usize,
    blocks: usize,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            hidden: 16,
            blocks: 4,
        }
    }
}

struct Surface;

impl TrainTask for Surface {
    type Config = Config;
    type Model = Net;

    fn name(&self) -> String {
        "surface".into()
    }

    fn model(&self, config: &Config, at: &ModelPlace<'_>) -> Result<Net, TaskError> {
        let NetConfig { hidden, blocks } = config.net;
        let embed = ParallelLinearConfig::new(2, hidden).with_name("embed");
        let head = ParallelLinearConfig::new(hidden, 1)
            .with_split(Split::Row)
            .with_name("head");
        Ok(Net {
            embed: at
                .is_first()
                .then(|| embed.init(at.tp(), at.device))
                .transpose()?,
            blocks: at.blocks(blocks, |n| Block::new(&format!("blocks.{n}"), hidden, at))?,
            head: at
                .is_last()
                .then(|| head.init(at.tp(), at.device))
                .transpose()?,
        })
    }

    fn data(&self, _: &Config) -> Result<TaskData<(Tensor<3>, Tensor<3>)>, TaskError> {
        let train = BatchFn::new(1_000, points(0));
        Ok(TaskData::new(train).with_validation(BatchFn::new(200, points(1_000))))
    }

    fn pipeline(&self, config: &Config, micro_batch: usize) -> Option<PipelineSplit> {
        Some(PipelineSplit::new(
            config.net.blocks,
            [1, micro_batch, config.net.hidden],
        ))
    }
}

fn main() -> ExitCode {
    megaburn::cli::train(Surface)
}

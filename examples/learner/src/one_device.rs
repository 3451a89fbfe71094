//! Classifies the points of three spirals. `src/parallel.rs` is the same program on several ranks.

use std::f32::consts::TAU;

use burn::{
    data::{dataloader::{DataLoaderBuilder, batcher::Batcher}, dataset::InMemDataset},
    lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig,
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::AdamWConfig,
    prelude::{Device, Int, Tensor},
    tensor::activation::gelu,
    train::{
        ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
        metric::{AccuracyMetric, LearningRateMetric, LossMetric},
    },
};

#[derive(Module, Debug)]
struct Net {
    up: Linear,
    down: Linear,
}

impl Net {
    fn classify(&self, (points, classes): Batch) -> ClassificationOutput {
        let output = self.down.forward(gelu(self.up.forward(points)));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), classes.clone());
        ClassificationOutput::new(loss, output, classes)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// Points, `[batch, 2]`, and their classes, `[batch]`.
type Batch = (Tensor<2>, Tensor<1, Int>);

/// A point and its class.
type Item = ([f32; 2], i64);

#[derive(Clone)]
struct Points;

impl Batcher<Item, Batch> for Points {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        let (points, classes): (Vec<[f32; 2]>, Vec<i64>) = items.into_iter().unzip();
        let points = Tensor::<1>::from_floats(points.as_flattened(), device).reshape([-1, 2]);
        (points, Tensor::from_ints(classes.as_slice(), device))
    }
}

/// Points of three spirals, from the `first` of every two on.
fn spirals(first: usize) -> InMemDataset<Item> {
    let point = |i: usize| {
        let (class, radius) = (i % 3, (i / 3) as f32 / 100.0);
        let (sin, cos) = (TAU * (class as f32 / 3.0 + 0.3 * radius)).sin_cos();
        ([radius * cos, radius * sin], class as i64)
    };
    InMemDataset::new((first..300).step_by(2).map(point).collect())
}

fn train(dir: &str, device: &Device) {
    let train = DataLoaderBuilder::new(Points).batch_size(10).shuffle(1).build(spirals(0));
    let valid = DataLoaderBuilder::new(Points).batch_size(10).build(spirals(1));
    let training = SupervisedTraining::new(dir, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .num_epochs(20)
        .summary();
    let model = Net {
        up: LinearConfig::new(2, 64).init(device),
        down: LinearConfig::new(64, 3).init(device),
    };
    let optimizer = AdamWConfig::new().with_weight_decay(0.01).init();
    let schedule = CosineAnnealingLrSchedulerConfig::new(2e-2, 300).init().unwrap();
    training.launch(Learner::new(model, optimizer, schedule));
}

fn main() {
    train("spirals", &Device::flex().autodiff());
}

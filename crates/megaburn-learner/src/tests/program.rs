//! A Learner program of a user: the model, the data, and what its metrics saw.

use std::{
    ops::Range,
    path::Path,
    sync::{Arc, Mutex},
};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::{linear::LinearLrSchedulerConfig, module_lr_scheduler::ModuleLrScheduler},
    module::Module,
    nn,
    nn::loss::{MseLoss, Reduction},
    optim::{AdamWConfig, ModuleOptimizer},
    prelude::Device,
    tensor::{Tensor, TensorData, TensorReadError, activation::gelu},
};
use burn_train::{
    InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    metric::{LossInput, Metric, MetricMetadata, SerializedEntry},
};
use megaburn_collective::{Group, GroupOptions, ProcessGroups, RankFailure, run_threads};
use megaburn_parallel::{ParallelLinear, ParallelLinearConfig, Sharded};

use crate::{LearnerError, ParallelTraining};

/// Width of the inputs.
pub(super) const WIDTH: usize = 3;

/// Number of items in a batch of one data-parallel rank.
pub(super) const BATCH: usize = 4;

#[derive(Module, Sharded, Debug)]
pub(super) struct Net {
    up: ParallelLinear,
    down: ParallelLinear,
    #[sharded(replicated = group)]
    norm: nn::LayerNorm,
    #[sharded(replicated = group)]
    head: nn::Linear,
    /// It gets no gradient.
    #[sharded(replicated = group)]
    unused: nn::Linear,
    #[sharded(replicated = group)]
    batch_norm: Option<nn::BatchNorm>,
    #[module(skip)]
    group: Group,
}

impl Net {
    /// The same weights under every layout, except for Burn's own layers, which each rank draws.
    pub(super) fn new(group: &Group) -> Self {
        let device = Device::flex().autodiff();
        let up = ParallelLinearConfig::column(WIDTH, 8).with_name("up");
        let down = ParallelLinearConfig::row(8, WIDTH).with_name("down");
        Self {
            up: up.init(group, &device).unwrap(),
            down: down.init(group, &device).unwrap(),
            norm: nn::LayerNormConfig::new(WIDTH).init(&device),
            head: nn::LinearConfig::new(WIDTH, 1).init(&device),
            unused: nn::LinearConfig::new(2, 2).init(&device),
            batch_norm: None,
            group: group.clone(),
        }
    }

    /// With the values of all layers known, for comparisons.
    pub(super) fn known(group: &Group) -> Self {
        let mut net = Self::new(group);
        let device = Device::flex().autodiff();
        let head = TensorData::from([[0.3f32], [-0.2], [0.5]]);
        net.head.weight = burn::module::Param::from_tensor(Tensor::from_data(head, &device));
        let bias = TensorData::from([0.05f32]);
        net.head.bias = Some(burn::module::Param::from_tensor(Tensor::from_data(
            bias, &device,
        )));
        let unused = Tensor::ones([2, 2], &device);
        net.unused.weight = burn::module::Param::from_tensor(unused);
        net.unused.bias = None;
        net
    }

    pub(super) fn with_batch_norm(self) -> Self {
        let norm = nn::BatchNormConfig::new(WIDTH).init(&Device::flex().autodiff());
        Self {
            batch_norm: Some(norm),
            ..self
        }
    }

    pub(super) fn running_mean(&self) -> Vec<f32> {
        let norm = self.batch_norm.as_ref().unwrap();
        norm.running_mean
            .value_sync()
            .into_data()
            .try_to_vec()
            .unwrap()
    }

    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = match &self.batch_norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        let x = x.unsqueeze_dim::<3>(1);
        let x = self.down.forward(gelu(self.up.forward(x)));
        self.head.forward(self.norm.forward(x.squeeze_dim(1)))
    }

    pub(super) fn loss(&self, [x, y]: [Tensor<2>; 2]) -> RegressionOutput {
        let output = self.forward(x);
        let loss = MseLoss::new().forward(output.clone(), y.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, y)
    }

    /// What the net computes of fixed inputs.
    pub(super) fn probe(&self) -> Vec<f32> {
        let [x, _] = batch(&(100..109).collect::<Vec<_>>(), &Device::flex());
        self.valid().forward(x).into_data().try_to_vec().unwrap()
    }

    /// The values of the layer without a gradient, and of a replicated one.
    pub(super) fn plain_layers(&self) -> Vec<f32> {
        let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
        let mut all = values(self.unused.weight.val());
        all.extend(values(self.head.weight.val()));
        all
    }
}

impl TrainStep for Net {
    type Input = [Tensor<2>; 2];
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
        let item = self.loss(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = [Tensor<2>; 2];
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> RegressionOutput {
        self.loss(batch)
    }
}

/// Inputs and targets of items.
pub(super) fn batch(items: &[u32], device: &Device) -> [Tensor<2>; 2] {
    let value = |item: u32, i: usize| ((item as usize * 7 + i * 13) % 23) as f32 / 23.0 - 0.5;
    let x: Vec<f32> = items
        .iter()
        .flat_map(|&item| (0..WIDTH).map(move |i| value(item, i)))
        .collect();
    let y: Vec<f32> = x
        .chunks(WIDTH)
        .map(|x| x[0] * 2.0 - x[1] * x[2] * 3.0)
        .collect();
    let rows = items.len();
    let tensor =
        |values: Vec<f32>, width| Tensor::from_data(TensorData::new(values, [rows, width]), device);
    [tensor(x, WIDTH), tensor(y, 1)]
}

#[derive(Clone)]
struct ToTensors;

impl Batcher<u32, [Tensor<2>; 2]> for ToTensors {
    fn batch(&self, items: Vec<u32>, device: &Device) -> [Tensor<2>; 2] {
        batch(&items, device)
    }
}

pub(super) fn loader(items: u32) -> Arc<dyn DataLoader<[Tensor<2>; 2]>> {
    loader_of(0..items)
}

pub(super) fn loader_of(items: Range<u32>) -> Arc<dyn DataLoader<[Tensor<2>; 2]>> {
    let items = InMemDataset::new(items.collect());
    DataLoaderBuilder::new(ToTensors)
        .batch_size(BATCH)
        .build(items)
}

/// The losses that a metric was given, in order, each with the number of items processed.
#[derive(Clone, Default)]
pub(super) struct Seen(Arc<Mutex<Vec<(usize, f32)>>>);

impl Seen {
    pub(super) fn all(&self) -> Vec<(usize, f32)> {
        self.0.lock().unwrap().clone()
    }
}

impl Metric for Seen {
    type Input = LossInput;

    fn name(&self) -> Arc<String> {
        Arc::new("Seen".to_owned())
    }

    fn update(
        &mut self,
        item: &LossInput,
        metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        let loss = loss_of(item);
        let done = metadata.progress.items_processed;
        self.0.lock().unwrap().push((done, loss));
        Ok(SerializedEntry::new(loss.to_string(), loss.to_string()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

/// The settings of the program, which is run on every rank of a layout.
#[derive(Clone)]
pub(super) struct Program<'a> {
    pub(super) dir: &'a Path,
    pub(super) train: u32,
    pub(super) valid: u32,
    pub(super) epochs: usize,
    pub(super) accumulation: Option<usize>,
    pub(super) max_grad_norm: Option<f64>,
    pub(super) resume: Option<usize>,
    pub(super) saves: bool,
}

impl<'a> Program<'a> {
    pub(super) fn new(dir: &'a Path) -> Self {
        Self {
            dir,
            train: 22,
            valid: 9,
            epochs: 2,
            accumulation: None,
            max_grad_norm: None,
            resume: None,
            saves: false,
        }
    }

    pub(super) fn training(&self) -> SupervisedTraining<Net> {
        let dir = self.dir.join("artifacts");
        let training = SupervisedTraining::new(dir, loader(self.train), loader(self.valid))
            .num_epochs(self.epochs)
            .with_application_logger(None)
            .renderer(Box::new(crate::silent::NoRenderer));
        let training = match self.accumulation {
            Some(batches) => training.grads_accumulation(batches),
            None => training,
        };
        match self.resume {
            Some(epoch) => training.checkpoint(epoch),
            None => training,
        }
    }

    pub(super) fn parallel(&self, groups: &ProcessGroups) -> ParallelTraining {
        let mut parallel = ParallelTraining::new(groups);
        if let Some(norm) = self.max_grad_norm {
            parallel = parallel.with_max_grad_norm(norm);
        }
        if self.saves {
            parallel = parallel.with_checkpoints(self.dir.join("checkpoints"));
        }
        parallel
    }

    /// Runs the program. Returns each rank's result.
    pub(super) fn run<T: Send>(
        &self,
        layout: &str,
        body: impl Fn(&Self, &ProcessGroups) -> Result<T, LearnerError> + Sync,
    ) -> Vec<Result<T, RankFailure<LearnerError>>> {
        let layout = layout.parse().unwrap();
        let world = megaburn_mesh::Layout::world_size(&layout);
        run_threads(world, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            body(self, &groups)
        })
    }

    /// Runs the program as it stands. Returns each rank's probe.
    pub(super) fn probes(&self, layout: &str) -> Vec<Vec<f32>> {
        let ranks = self.run(layout, |program, groups| {
            let result = program.parallel(groups).launch(
                program.training(),
                Net::known(&groups.tp),
                optimizer(),
                schedule(),
            )?;
            Ok(result.model.probe())
        });
        ranks.into_iter().map(|rank| rank.unwrap()).collect()
    }
}

pub(super) fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

pub(super) fn schedule() -> ModuleLrScheduler {
    LinearLrSchedulerConfig::new(2e-2, 1e-3, 12).init().unwrap()
}

/// The value of a loss that a metric is given.
fn loss_of(item: &LossInput) -> f32 {
    let mut metric = burn_train::metric::LossMetric::new();
    let entry = metric.update(item, &metadata()).unwrap();
    entry.serialized.split(',').next().unwrap().parse().unwrap()
}

fn metadata() -> MetricMetadata {
    MetricMetadata {
        progress: burn::data::dataloader::Progress::new(0, 0, None),
        iteration: None,
        lr: None,
    }
}

pub(super) fn close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() < 2e-5,
            "{what}: {found} {expected}"
        );
    }
}

//! A training of a few parameters of ragged shapes, under any rule and sharding.

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::{Device, Distribution, FloatDType, TensorData},
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::{Axis, ParamSpec, ShardPlan, ShardSpec};

use crate::{
    accumulator::GradientAccumulator,
    held_state::HeldState,
    optimizer::Optimizer,
    rule::{AdamWConfig, LionConfig, MuonConfig, SgdConfig},
    sharding::Sharding,
};

pub(crate) const RULES: [&str; 4] = ["adamw", "sgd", "lion", "muon"];

#[derive(Module, Debug)]
pub(crate) struct Layers {
    pub(crate) weights: Vec<Param<Tensor<2>>>,
    pub(crate) biases: Vec<Param<Tensor<1>>>,
}

pub(crate) const SHAPES: [[usize; 2]; 4] = [[3, 5], [8, 4], [4, 4], [1, 7]];

/// The initial weights, the same on every rank.
pub(crate) fn start() -> Vec<TensorData> {
    let normal = Distribution::Normal(0.0, 1.0);
    let draw = |shape| Tensor::<2>::random(shape, normal, &Device::default()).into_data();
    SHAPES.map(draw).into()
}

impl Layers {
    pub(crate) fn new(start: &[TensorData], device: &Device) -> Self {
        let weights = start
            .iter()
            .map(|data| Param::from_data(data.clone(), device));
        let biases =
            SHAPES.map(|[_, n]| Param::from_tensor(Tensor::ones([n], device).require_grad()));
        Self {
            weights: weights.collect(),
            biases: biases.into(),
        }
    }

    pub(crate) fn loss(&self, step: usize) -> Tensor<1> {
        let weights = self
            .weights
            .iter()
            .map(|w| (w.val() * (step + 1) as f32).sin().sum());
        let biases = self.biases.iter().map(|b| b.val().exp().sum());
        weights
            .chain(biases)
            .map(|part| part.cast(FloatDType::F32))
            .reduce(|a, b| a + b)
            .unwrap()
    }

    pub(crate) fn plan() -> ShardPlan {
        let mut plan = ShardPlan::new();
        for (i, [rows, cols]) in SHAPES.into_iter().enumerate() {
            for (kind, shape) in [("weights", &[rows, cols][..]), ("biases", &[cols])] {
                let shard = ShardSpec::whole(shape, Axis::Tp, 0, 1);
                plan.insert(format!("{kind}.{i}"), ParamSpec { shard })
                    .unwrap();
            }
        }
        plan
    }

    /// A parameter by its path, flat.
    pub(crate) fn flat(&self, path: &str) -> Tensor<1> {
        let (kind, i) = path.split_once('.').unwrap();
        let i: usize = i.parse().unwrap();
        match kind {
            "weights" => self.weights[i].val().inner().flatten(0, 1),
            _ => self.biases[i].val().inner(),
        }
    }

    pub(crate) fn bits(&self) -> Vec<u32> {
        let weights = self.weights.iter().map(|w| w.val().inner().flatten(0, 1));
        let all = weights.chain(self.biases.iter().map(|b| b.val().inner()));
        all.flat_map(bits).collect()
    }
}

pub(crate) fn bits(tensor: Tensor<1>) -> Vec<u32> {
    let values = tensor
        .into_data()
        .convert::<f32>()
        .try_to_vec::<f32>()
        .unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

pub(crate) fn optimizer(rule: &str, sharding: &Sharding, fraction: f64) -> Optimizer {
    let optimizer = match rule {
        "adamw" => AdamWConfig::new().init(sharding),
        "sgd" => SgdConfig::default().init(sharding),
        "lion" => LionConfig::default().init(sharding),
        _ => MuonConfig::default().init(sharding, &ProcessGroups::single(0)),
    };
    optimizer.unwrap().with_cpu_offload(fraction).unwrap()
}

pub(crate) struct Training {
    pub(crate) net: Layers,
    pub(crate) optimizer: Optimizer,
    pub(crate) grads: GradientAccumulator,
}

impl Training {
    pub(crate) fn new(
        start: &[TensorData],
        sharding: &Sharding,
        optimizer: Optimizer,
        dtype: FloatDType,
    ) -> Self {
        let net = Layers::new(start, &Device::default().autodiff());
        let mut optimizer = optimizer;
        let net = optimizer.cast_params(net, dtype);
        let grads = GradientAccumulator::new(&net, &Layers::plan(), sharding).unwrap();
        Self {
            net,
            optimizer,
            grads,
        }
    }

    /// One step with gradients that have a pending factor known only on the device.
    pub(crate) fn step(&mut self, number: usize, factor: f32) {
        self.grads.reset();
        self.grads
            .accumulate(&self.net, &mut self.net.loss(number).backward());
        self.grads.end_micro_batch().unwrap();
        self.grads.reduce().unwrap();
        self.grads.factor_on_gpu = Some(Tensor::from_floats([factor], &Device::default()));
        let net = self
            .optimizer
            .step(1e-2, self.net.clone(), &self.grads)
            .unwrap();
        self.grads.sharding.settle();
        self.net = net;
    }

    /// The masters and moments that this rank holds.
    pub(crate) fn held(&self) -> HeldState {
        let len = |path: &str| {
            let plan = Layers::plan();
            let spec = plan.get(path).unwrap();
            spec.shard.local_shape().iter().product()
        };
        self.optimizer.held_state(len, |path| self.net.flat(path))
    }
}

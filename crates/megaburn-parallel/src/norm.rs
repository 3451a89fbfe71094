use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::Tensor,
};
use megaburn_collective::{Group, region::copy_to};
use megaburn_kernels::{layer_norm, rms_norm};
use megaburn_mesh::{Axis, ShardSpec};

use crate::{PlanBuilder, Sharded};

/// Configuration of an [`RmsNorm`].
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Features.
    pub d_model: usize,
    /// Added to the mean square.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether the input holds this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
}

impl RmsNormConfig {
    /// The norm, with gamma at one.
    pub fn init(&self, group: &Group, device: &Device) -> RmsNorm {
        let gamma = Initializer::Ones.init([self.d_model], device);
        RmsNorm {
            gamma,
            epsilon: self.epsilon,
            replica: Replica::of(group, self.sequence_parallel),
        }
    }
}

/// `x / sqrt(mean(x^2) + eps) * gamma` over the last dimension, statistics in f32. Every rank holds
/// gamma.
///
/// Source: Zhang and Sennrich (2019).
/// # Collective
/// Forward: none. Backward: with sequence parallelism one all-reduce of gamma's gradient, because
/// each rank sees its own tokens only.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The scale, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
    #[module(skip)]
    replica: Replica,
}

impl RmsNorm {
    /// Applies the norm.
    ///
    /// # Shapes
    /// `[.., d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(x, self.replica.value(&self.gamma), self.epsilon)
    }
}

impl Sharded for RmsNorm {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.param("gamma", &self.replica.spec(&self.gamma));
    }
}

/// Configuration of a [`LayerNorm`].
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Features.
    pub d_model: usize,
    /// Added to the variance.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether there is a beta.
    #[config(default = true)]
    pub bias: bool,
    /// Whether the input holds this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
}

impl LayerNormConfig {
    /// The norm, with gamma at one and beta at zero.
    pub fn init(&self, group: &Group, device: &Device) -> LayerNorm {
        LayerNorm {
            gamma: Initializer::Ones.init([self.d_model], device),
            beta: self.bias.then(|| Initializer::Zeros.init([self.d_model], device)),
            epsilon: self.epsilon,
            replica: Replica::of(group, self.sequence_parallel),
        }
    }
}

/// `(x - mean) / sqrt(var + eps) * gamma + beta` over the last dimension, statistics in f32. Every
/// rank holds gamma and beta.
///
/// Source: Ba et al. (2016).
/// # Collective
/// As [`RmsNorm`], for gamma and beta.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// The scale, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// The shift, `[d_model]`.
    pub beta: Option<Param<Tensor<1>>>,
    /// Added to the variance.
    pub epsilon: f64,
    #[module(skip)]
    replica: Replica,
}

impl LayerNorm {
    /// Applies the norm.
    ///
    /// # Shapes
    /// `[.., d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let beta = self.beta.as_ref().map(|beta| self.replica.value(beta));
        layer_norm(x, self.replica.value(&self.gamma), beta, self.epsilon)
    }
}

impl Sharded for LayerNorm {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.param("gamma", &self.replica.spec(&self.gamma));
        if let Some(beta) = &self.beta {
            plan.param("beta", &self.replica.spec(beta));
        }
    }
}

/// A parameter that every rank of a group holds whole.
#[derive(Clone, Debug)]
struct Replica {
    group: Group,
    sequence_parallel: bool,
}

impl Replica {
    fn of(group: &Group, sequence_parallel: bool) -> Self {
        Self { group: group.clone(), sequence_parallel }
    }

    /// The value as used on this rank's tokens.
    fn value<const D: usize>(&self, param: &Param<Tensor<D>>) -> Tensor<D> {
        if self.sequence_parallel { copy_to(param.val(), &self.group) } else { param.val() }
    }

    fn spec<const D: usize>(&self, param: &Param<Tensor<D>>) -> ShardSpec {
        ShardSpec::whole(&param.dims(), Axis::Tp, self.group.rank(), self.group.size())
    }
}

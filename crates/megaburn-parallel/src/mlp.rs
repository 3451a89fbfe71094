use burn::{
    config::Config,
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, activation},
};
use megaburn_collective::Group;
use megaburn_kernels::swiglu;
use megaburn_mesh::Part;

use crate::{ParallelError, ParallelLinear, ParallelLinearConfig, PlanBuilder, Sharded};

/// Configuration of a [`GatedMlp`].
#[derive(Config, Debug)]
pub struct GatedMlpConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features inside.
    pub d_ffn: usize,
    /// Whether input and output hold this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the gate and up matrices start.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// How the down matrix starts.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

impl GatedMlpConfig {
    /// This rank's shard.
    ///
    /// # Errors
    /// See [`ParallelLinearConfig::init`].
    pub fn init(&self, group: &Group, device: &Device) -> Result<GatedMlp, ParallelError> {
        let Self { d_model, d_ffn, sequence_parallel, .. } = *self;
        let gate_up = ParallelLinearConfig::column(d_model, 2 * d_ffn)
            .with_parts([Part::new(d_ffn), Part::new(d_ffn)])
            .with_initializer(self.initializer.clone());
        let down = ParallelLinearConfig::row(d_ffn, d_model)
            .with_initializer(self.output_initializer.clone());
        let layer = |mut config: ParallelLinearConfig, field: &str| {
            config.path = self.path.as_ref().map(|name| format!("{name}.{field}"));
            config.with_bias(false).with_sequence_parallel(sequence_parallel).init(group, device)
        };
        Ok(GatedMlp { gate_up: layer(gate_up, "gate_up")?, down: layer(down, "down")? })
    }
}

/// `down(silu(gate(x)) * up(x))`, gate and up in one matrix.
///
/// Source: Shazeer, "GLU variants improve transformer" (2020).
/// # Collective
/// As a column and a row [`ParallelLinear`].
#[derive(Module, Debug)]
pub struct GatedMlp {
    /// Gate and up, `[d_model, 2 * d_ffn / n]`: this rank's gate columns, then its up columns.
    pub gate_up: ParallelLinear,
    /// Down, `[d_ffn / n, d_model]`.
    pub down: ParallelLinear,
}

impl GatedMlp {
    /// Applies the MLP.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.down.forward(swiglu(self.gate_up.forward(x)))
    }
}

impl Sharded for GatedMlp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("gate_up", &self.gate_up);
        plan.child("down", &self.down);
    }
}

/// The function between an [`Mlp`]'s matrices.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GELU by the error function (BERT).
    Gelu,
    /// GELU by the tanh approximation (GPT-2).
    GeluTanh,
    /// ReLU.
    Relu,
}

impl Activation {
    /// Applies the function to each element.
    pub fn forward<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Gelu => activation::gelu(x),
            Self::GeluTanh => activation::gelu_approximate(x),
            Self::Relu => activation::relu(x),
        }
    }
}

/// Configuration of an [`Mlp`].
#[derive(Config, Debug)]
pub struct MlpConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features inside.
    pub d_ffn: usize,
    /// The function between the matrices.
    #[config(default = "Activation::GeluTanh")]
    pub activation: Activation,
    /// Whether the matrices have biases.
    #[config(default = true)]
    pub bias: bool,
    /// Whether input and output hold this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the matrices start.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

impl MlpConfig {
    /// This rank's shard.
    ///
    /// # Errors
    /// See [`ParallelLinearConfig::init`].
    pub fn init(&self, group: &Group, device: &Device) -> Result<Mlp, ParallelError> {
        let layer = |mut config: ParallelLinearConfig, field: &str| {
            config.path = self.path.as_ref().map(|name| format!("{name}.{field}"));
            config
                .with_bias(self.bias)
                .with_sequence_parallel(self.sequence_parallel)
                .with_initializer(self.initializer.clone())
                .init(group, device)
        };
        Ok(Mlp {
            up: layer(ParallelLinearConfig::column(self.d_model, self.d_ffn), "up")?,
            down: layer(ParallelLinearConfig::row(self.d_ffn, self.d_model), "down")?,
            activation: self.activation,
        })
    }
}

/// `down(activation(up(x)))`.
///
/// # Collective
/// As a column and a row [`ParallelLinear`].
#[derive(Module, Debug)]
pub struct Mlp {
    /// Up, `[d_model, d_ffn / n]`.
    pub up: ParallelLinear,
    /// Down, `[d_ffn / n, d_model]`.
    pub down: ParallelLinear,
    #[module(skip)]
    activation: Activation,
}

impl Mlp {
    /// Applies the MLP.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.down.forward(self.activation.forward(self.up.forward(x)))
    }
}

impl Sharded for Mlp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("up", &self.up);
        plan.child("down", &self.down);
    }
}

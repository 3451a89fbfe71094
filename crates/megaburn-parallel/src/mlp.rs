use burn::{
    config::Config,
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, activation},
};
use megaburn_autograd::RecomputeFn;
use megaburn_collective::Group;
use megaburn_kernels::{
    Bias, FoundAmax, bias_gelu, bias_gelu_tanh, clamped_swiglu, clamped_swiglu_weighted, geglu,
    geglu_tanh, geglu_tanh_weighted, geglu_weighted, gelu, gelu_tanh, squared_relu,
    squared_relu_weighted, swiglu, swiglu_observed, swiglu_weighted,
};
use megaburn_mesh::FusedPart;

use crate::{
    error::ParallelError,
    init::named,
    linear::{LinearPrecision, ParallelLinear, ParallelLinearConfig, PrecisionScope},
    recomputable::Recomputable,
    shards::Sharded,
};

/// The function between an [`Mlp`]'s matrices.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) * up` (Shazeer, "GLU variants improve transformer", 2020).
    SwiGlu,
    /// `gelu(gate) * up`, with GELU by the error function (Shazeer, 2020).
    GeGlu,
    /// `gelu_tanh(gate) * up`, with GELU by the tanh approximation (Gemma).
    GeGluTanh,
    /// `gate * sigmoid(1.702 gate) * (up + 1)` with `gate` at most 7 and `up` within `[-7, 7]`
    /// (OpenAI, gpt-oss, 2025).
    ClampedSwiGlu,
    /// GELU by the error function (BERT).
    Gelu,
    /// GELU by the tanh approximation (GPT-2).
    GeluTanh,
    /// ReLU.
    Relu,
    /// `relu(x)^2` (So et al., "Primer", 2021; Nemotron).
    SquaredRelu,
}

impl Activation {
    /// Applies the function.
    ///
    /// # Shapes
    /// `[.., d_ffn]`, unchanged; a gated activation takes `[.., gate | up]`
    pub fn forward<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::SwiGlu => swiglu(x),
            Self::GeGlu => geglu(x),
            Self::GeGluTanh => geglu_tanh(x),
            Self::ClampedSwiGlu => clamped_swiglu(x),
            Self::Gelu => gelu(x),
            Self::GeluTanh => gelu_tanh(x),
            Self::Relu => activation::relu(x),
            Self::SquaredRelu => squared_relu(x),
        }
    }

    /// Applies the function to `x + bias` in one pass over memory. Only for activations whose
    /// kernel [takes a bias](Self::takes_bias).
    fn activate_biased<const D: usize>(self, x: Tensor<D>, bias: Bias) -> Tensor<D> {
        match self {
            Self::Gelu => bias_gelu(x, bias),
            Self::GeluTanh => bias_gelu_tanh(x, bias),
            _ => unreachable!("the layer itself adds the bias"),
        }
    }

    /// Whether a fused kernel adds the bias.
    fn takes_bias(self) -> bool {
        matches!(self, Self::Gelu | Self::GeluTanh)
    }

    /// Applies the function and multiplies each row by its weight.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward); `weight`: one per row
    pub(crate) fn weighted(self, x: Tensor<2>, weight: Tensor<1>) -> Tensor<2> {
        match self {
            Self::SwiGlu => swiglu_weighted(x, weight),
            Self::GeGlu => geglu_weighted(x, weight),
            Self::GeGluTanh => geglu_tanh_weighted(x, weight),
            Self::ClampedSwiGlu => clamped_swiglu_weighted(x, weight),
            Self::SquaredRelu => squared_relu_weighted(x, weight),
            Self::Gelu | Self::GeluTanh | Self::Relu => {
                let y = self.forward(x);
                let weight = weight.unsqueeze_dim(1).cast(y.dtype());
                y * weight
            }
        }
    }

    /// Whether the activation multiplies one half of its input by the other.
    pub fn is_gated(self) -> bool {
        matches!(
            self,
            Self::SwiGlu | Self::GeGlu | Self::GeGluTanh | Self::ClampedSwiGlu
        )
    }
}

/// Configuration of an [`Mlp`].
#[derive(Config, Debug)]
pub struct MlpConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features of the hidden layer.
    pub d_ffn: usize,
    /// The function between the matrices.
    #[config(default = "Activation::GeluTanh")]
    pub activation: Activation,
    /// Whether the matrices have biases.
    #[config(default = true)]
    pub bias: bool,
    /// Whether input and output are sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Whether backward recomputes the activation instead of keeping its output, which is as large
    /// as its input or half as large. The input is saved for the activation's own backward anyway.
    #[config(default = false)]
    pub recompute: bool,
    /// How the matrices are quantised for their products; `None` multiplies them as they are.
    pub precision: Option<LinearPrecision>,
    /// Initializer of the up (and gate) matrix.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the down matrix.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

named!(MlpConfig);

impl MlpConfig {
    /// `down(silu(gate(x)) * up(x))` without biases, as in Llama.
    pub fn gated(d_model: usize, d_ffn: usize) -> Self {
        Self::new(d_model, d_ffn)
            .with_activation(Activation::SwiGlu)
            .with_bias(false)
    }

    /// Builds this rank's shard.
    ///
    /// # Errors
    /// See [`ParallelLinearConfig::init`].
    pub fn init(&self, group: &Group, device: &Device) -> Result<Mlp, ParallelError> {
        let Self {
            d_model,
            d_ffn,
            activation,
            ..
        } = *self;
        let up = if activation.is_gated() {
            ParallelLinearConfig::column(d_model, 2 * d_ffn)
                .with_parts([FusedPart::new(d_ffn), FusedPart::new(d_ffn)])
        } else {
            ParallelLinearConfig::column(d_model, d_ffn)
        };
        let down = ParallelLinearConfig::row(d_ffn, d_model);
        let layer = |mut config: ParallelLinearConfig, field: &str, initializer: &Initializer| {
            config.path = self.path.as_ref().map(|name| format!("{name}.{field}"));
            config.precision = self.precision;
            config
                .with_bias(self.bias)
                .with_sequence_parallel(self.sequence_parallel)
                .with_initializer(initializer.clone())
                .with_bias_initializer(Some(Initializer::Zeros))
                .init(group, device)
        };
        Ok(Mlp {
            up: layer(up, "up", &self.initializer)?,
            down: layer(down, "down", &self.output_initializer)?,
            activation,
            recompute: self.recompute,
        })
    }
}

/// `down(activation(up(x)))`. For a gated activation, one matrix holds gate and up.
///
/// # Collective
/// As a column and a row [`ParallelLinear`].
#[derive(Module, Sharded, Debug)]
pub struct Mlp {
    /// The up matrix, `[d_model, d_ffn / n]`; gated `[d_model, 2 * d_ffn / n]`: this rank's gate
    /// columns, then its up columns.
    pub up: ParallelLinear,
    /// The down matrix, `[d_ffn / n, d_model]`.
    pub down: ParallelLinear,
    #[module(skip)]
    activation: Activation,
    recompute: bool,
}

impl Mlp {
    /// Applies the MLP.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: impl Into<Recomputable<D>>) -> Tensor<D> {
        let mut x = x.into();
        let of_result = x.take_gradient_amax();
        let hidden = if self.activation == Activation::SwiGlu && self.up.needs_amaxes() {
            self.observed_hidden(x)
        } else if self.activation.takes_bias() {
            let (x, bias) = self.up.forward_deferred_bias(x);
            self.activated(x, bias)
        } else {
            self.activated(self.up.forward(x), None)
        };
        self.down.forward(hidden.with_gradient_amax(of_result))
    }

    /// The hidden layer, where the activation finds the largest magnitudes of its result and of its
    /// input's gradient, which the matrices' products need.
    fn observed_hidden<const D: usize>(&self, x: Recomputable<D>) -> Recomputable<D> {
        let [result, gradient] = <[FoundAmax; 2]>::default();
        let x = self
            .up
            .forward(x.with_gradient_amax(Some(gradient.clone())));
        let again = self.recompute.then(|| {
            let x = x.clone().inner();
            RecomputeFn::new(move || swiglu(x.clone()))
        });
        let y = swiglu_observed(x, result.clone(), gradient);
        let y = match again {
            Some(again) => Recomputable::recomputed(y, again),
            None => y.into(),
        };
        y.with_amax(Some(result))
    }

    /// Whether the MLP needs the largest magnitude of its input, and whether the operation that writes
    /// the input can find it.
    pub fn needs_input_amax(&self) -> bool {
        self.up.needs_input_amax()
    }

    /// Whether the MLP needs the largest magnitude of its result's gradient, and whether the operation
    /// that writes the gradient can find it.
    pub fn needs_gradient_amax(&self) -> bool {
        self.down.needs_gradient_amax()
    }

    fn activated<const D: usize>(&self, x: Tensor<D>, bias: Option<Bias>) -> Recomputable<D> {
        let activation = self.activation;
        let forward = move |x: Tensor<D>, bias: Option<Bias>| match bias {
            Some(bias) => activation.activate_biased(x, bias),
            None => activation.forward(x),
        };
        let kept = self
            .recompute
            .then(|| (x.clone().inner(), bias.clone().map(Bias::inner)));
        let y = forward(x, bias);
        match kept {
            Some((x, bias)) => Recomputable::recomputed(
                y,
                RecomputeFn::new(move || forward(x.clone(), bias.clone())),
            ),
            None => y.into(),
        }
    }

    /// As [`ParallelLinear::in_scope`].
    pub fn in_scope(self, scope: &PrecisionScope) -> Self {
        Self {
            up: self.up.in_scope(scope),
            down: self.down.in_scope(scope),
            ..self
        }
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(self) -> Self {
        let Self { up, down, .. } = self;
        Self {
            up: up.whole_sequence(),
            down: down.whole_sequence(),
            ..self
        }
    }
}

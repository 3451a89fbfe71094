//! The common implementation of all MLP activations: one operation with options, composed of
//! primitives on CPUs and fused kernels on GPUs. The backward pass recomputes everything from the
//! inputs.

mod fallback;
pub(crate) mod geglu;
pub(crate) mod gelu;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
pub(crate) mod reference;
pub(crate) mod squared_relu;
pub(crate) mod swiglu;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

use crate::bias::Bias;
use op::Biased;

/// The pointwise function of an activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PointwiseFn {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)`.
    Gelu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`.
    GeluTanh,
    /// `max(x, 0)^2`.
    SquaredRelu,
}

/// Which activation is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Activation {
    pub(crate) curve: PointwiseFn,
    /// Whether the first half of a row goes through the curve and multiplies the second half.
    pub(crate) gated: bool,
}

/// The inputs of an activation.
///
/// # Shapes
/// - `x`: `[.., f]`, or `[.., 2f]` for a gated activation
/// - `bias`: `[f]`, the last dimension of `x`
/// - `weight`: one number per row of `x`
#[derive(Clone, Debug)]
pub(crate) struct ActivationInput<T> {
    pub(crate) x: T,
    /// Added to each row before the activation; not supported for gated activations.
    pub(crate) bias: Option<T>,
    /// Each row of the result is multiplied by its weight.
    pub(crate) weight: Option<T>,
}

/// Gradients of an activation's inputs, `x` and `weight` in the dtypes of those inputs.
pub(crate) struct ActivationGrads<T> {
    pub(crate) x: T,
    /// Rows that sum to the bias gradient, in f32 or wider.
    pub(crate) bias: Option<T>,
    pub(crate) weight: Option<T>,
}

/// An activation and its backward pass, with the best implementation per backend.
pub(crate) trait Activate: Backend {
    fn forward(
        activation: Activation,
        input: ActivationInput<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        fallback::forward::<Self>(activation, input)
    }

    fn backward(
        activation: Activation,
        input: ActivationInput<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
    ) -> ActivationGrads<FloatTensor<Self>> {
        fallback::backward::<Self>(activation, input, dy)
    }
}

#[cfg(feature = "flex")]
impl Activate for burn::backend::Flex {}

/// `curve(x)`.
pub(crate) fn plain<const D: usize>(name: &str, curve: PointwiseFn, x: Tensor<D>) -> Tensor<D> {
    arg_check::check(name, [float("x", &x)]);
    let activation = Activation {
        curve,
        gated: false,
    };
    fused(activation, [x.into_dispatch()])
}

/// `curve(x + bias)`.
pub(crate) fn biased<const D: usize>(
    name: &str,
    curve: PointwiseFn,
    x: Tensor<D>,
    bias: Bias,
) -> Tensor<D> {
    arg_check::check(name, [float("x", &x), float("the bias", &bias.value)]);
    bias.check(name, x.dims()[D - 1]);
    let activation = Activation {
        curve,
        gated: false,
    };
    let x = x.into_dispatch();
    let value = bias.value.into_dispatch();
    let how = Biased {
        activation,
        main_grad: bias.main_grad,
    };
    fused(how, [x, value])
}

/// `curve(gate) * up`, multiplied by a weight per row if weights are given.
pub(crate) fn gated<const D: usize>(
    name: &str,
    curve: PointwiseFn,
    gate_up: Tensor<D>,
    weight: Option<Tensor<1>>,
) -> Tensor<D> {
    arg_check::check(name, [float("gate_up", &gate_up)]);
    let n = gate_up.dims()[D - 1];
    assert!(
        n.is_multiple_of(2),
        "{name}: the last dimension, {n}, must be even (gate and up halves)"
    );
    let activation = Activation { curve, gated: true };
    match weight {
        Some(weight) => weighted(name, activation, gate_up, weight),
        None => fused(activation, [gate_up.into_dispatch()]),
    }
}

/// The activation of each row, multiplied by the row's weight.
pub(crate) fn weighted<const D: usize>(
    name: &str,
    activation: Activation,
    x: Tensor<D>,
    weight: Tensor<1>,
) -> Tensor<D> {
    arg_check::check(name, [float("x", &x), float("the weight", &weight)]);
    let (dims, [length]) = (x.dims(), weight.dims());
    let rows = dims[..D - 1].iter().product::<usize>();
    assert_eq!(
        rows, length,
        "{name}: {length} weights do not match {rows} rows"
    );
    assert!(dims[D - 1] > 0, "{name}: x is {dims:?}, its rows are empty");
    let x = x.into_dispatch();
    let weight = weight.into_dispatch();
    fused(activation, [x, weight])
}

//! Activations under automatic differentiation.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use megaburn_autograd::{FusedOp, InputGrads, MainGrad, optional};

use crate::bias::{ColumnSum, bias_gradient};
use crate::quantized::FoundAmax;
use crate::quantized::operands::QuantizedOps;

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
    /// `x * sigmoid(1.702 x)` with `x` at most 7, only gated: the other half is limited to
    /// `[-7, 7]`, and 1 is added to it.
    ClampedSilu,
}

/// The largest input of [`PointwiseFn::ClampedSilu`], and the largest size of its factor.
pub(super) const CLAMP: f64 = 7.0;
/// The slope of the sigmoid of [`PointwiseFn::ClampedSilu`].
pub(super) const ALPHA: f64 = 1.702;

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

/// An activation that finds the largest magnitudes of its result and of its input's gradient, for
/// the layers that quantise them.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    pub(crate) activation: Activation,
    pub(crate) result: FoundAmax,
    pub(crate) gradient: FoundAmax,
}

/// An activation and its backward pass, with the best implementation per backend.
pub(crate) trait Activate: QuantizedOps {
    /// [`forward`](Self::forward), and the largest magnitude of its result.
    fn forward_observed(activation: Activation, x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let y = Self::forward(activation, x.into());
        [y.clone(), Self::largest_magnitude(y)]
    }

    /// The gradient of `x`, and its largest magnitude.
    fn backward_observed(
        activation: Activation,
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let ActivationGrads { x: dx, .. } = Self::backward(activation, x.into(), dy);
        [dx.clone(), Self::largest_magnitude(dx)]
    }

    fn forward(
        activation: Activation,
        input: ActivationInput<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;

    fn backward(
        activation: Activation,
        input: ActivationInput<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
    ) -> ActivationGrads<FloatTensor<Self>>;
}

/// An activation of `x: [.., f]`, or `[.., 2f]` where it is gated, optionally with a weight for each
/// row of `x`.
impl<B: Activate, const N: usize> FusedOp<B, N> for Activation {
    type Saved = (Activation, ActivationInput<FloatTensor<B>>);

    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
        let input = weighted(inputs);
        let y = B::forward(self, input.clone());
        (y, (self, input))
    }

    fn infer(self, inputs: [FloatTensor<B>; N]) -> FloatTensor<B> {
        B::forward(self, weighted(inputs))
    }

    fn backward(
        (activation, input): Self::Saved,
        dy: FloatTensor<B>,
        mut grads: InputGrads<'_, B>,
    ) {
        let ActivationGrads { x, weight, .. } = B::backward(activation, input, dy);
        grads.register_all([Some(x), weight]);
    }
}

impl<B: Activate> FusedOp<B, 1> for Observed {
    type Saved = (Observed, FloatTensor<B>);

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let [y, amax] = B::forward_observed(self.activation, x.clone());
        self.result.put::<B>(amax);
        (y, (self, x))
    }

    fn backward((how, x): Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let [dx, amax] = B::backward_observed(how.activation, x, dy);
        how.gradient.put::<B>(amax);
        grads.register(0, dx);
    }
}

impl<T> From<T> for ActivationInput<T> {
    fn from(x: T) -> Self {
        weighted([x])
    }
}

fn weighted<T, const N: usize>(inputs: [T; N]) -> ActivationInput<T> {
    let ([x], [weight]) = optional(inputs);
    ActivationInput {
        x,
        bias: None,
        weight,
    }
}

/// An activation applied to `x + bias`, where `x: [.., f]` and `bias: [f]`.
#[derive(Clone, Debug)]
pub(crate) struct Biased {
    pub(super) activation: Activation,
    /// The main gradient that accumulates the bias gradient, once attached.
    pub(super) main_grad: Option<MainGrad>,
}

impl<B: Activate + ColumnSum> FusedOp<B, 2> for Biased {
    /// The last element is the bias's dtype.
    type Saved = (Biased, ActivationInput<FloatTensor<B>>, DType);

    fn forward(self, inputs: [FloatTensor<B>; 2]) -> (FloatTensor<B>, Self::Saved) {
        let dtype = inputs[1].dtype();
        let input = biased(inputs);
        let y = B::forward(self.activation, input.clone());
        (y, (self, input, dtype))
    }

    fn infer(self, inputs: [FloatTensor<B>; 2]) -> FloatTensor<B> {
        B::forward(self.activation, biased(inputs))
    }

    fn backward(
        (how, input, dtype): Self::Saved,
        dy: FloatTensor<B>,
        mut grads: InputGrads<'_, B>,
    ) {
        let ActivationGrads { x, bias, .. } = B::backward(how.activation, input, dy);
        grads.register(0, x);
        if let Some(rows) = bias.filter(|_| grads.wants(1))
            && let Some(gradient) = bias_gradient::<B>(rows, dtype, how.main_grad.as_ref())
        {
            grads.register(1, gradient);
        }
    }
}

fn biased<T>([x, bias]: [T; 2]) -> ActivationInput<T> {
    ActivationInput {
        x,
        bias: Some(bias),
        weight: None,
    }
}

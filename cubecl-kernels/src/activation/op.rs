//! Activations under automatic differentiation.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use megaburn_autograd::{FusedOp, InputGrads, MainGrad, optional};

use super::{Activate, Activation, ActivationGrads, ActivationInput};
use crate::bias::{ColumnSum, bias_gradient};

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

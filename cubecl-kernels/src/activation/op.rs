//! Activations under automatic differentiation.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::DType;
use megaburn_autograd::{MainGrad, on_every_backend};

use super::{Activate, Activation, ActivationGrads, ActivationInput};
use crate::bias::{ColumnSum, bias_gradient};

/// An activation applied to `x + bias`.
#[derive(Clone, Debug)]
pub(crate) struct Biased {
    pub(super) activation: Activation,
    /// The main gradient that accumulates the bias gradient, once attached.
    pub(super) main_grad: Option<MainGrad>,
}

// (`backend_extension` does not support optional tensors.)
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait ActivationOps: Backend {
    /// `x: [.., f]`, or `[.., 2f]` where it is gated.
    fn activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;

    /// `x: [.., f]`, `bias: [f]`.
    fn biased_activation(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        how: Biased,
    ) -> FloatTensor<Self>;

    /// `weight` has one number per row of `x`.
    fn weighted_activation(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl ActivationOps {
        fn activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
            Self::forward(activation, ActivationInput { x, bias: None, weight: None })
        }

        fn biased_activation(
            x: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            how: Biased,
        ) -> FloatTensor<Self> {
            Self::forward(how.activation, ActivationInput { x, bias: Some(bias), weight: None })
        }

        fn weighted_activation(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            activation: Activation,
        ) -> FloatTensor<Self> {
            Self::forward(activation, ActivationInput { x, bias: None, weight: Some(weight) })
        }
    }
}

/// Backward of an activation; the parents are `x` and the weights, if there are any.
#[derive(Debug)]
struct ActivationBackward;

impl<B: Activate, const N: usize> Backward<B, N> for ActivationBackward {
    type State = (Activation, ActivationInput<FloatTensor<B>>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (activation, input) = ops.state;
        let ActivationGrads { x, weight, .. } = B::backward(activation, input, dy);
        let found = [Some(x), weight];
        for (parent, gradient) in ops.parents.into_iter().zip(found) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

#[derive(Debug)]
struct BiasedBackward;

impl<B: Activate + ColumnSum> Backward<B, 2> for BiasedBackward {
    /// The last element is the bias's dtype.
    type State = (Biased, ActivationInput<FloatTensor<B>>, DType);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (
            Biased {
                activation,
                main_grad,
            },
            input,
            dtype,
        ) = ops.state;
        let ActivationGrads { x, bias, .. } = B::backward(activation, input, dy);
        let [for_x, for_bias] = ops.parents;
        if let Some(node) = for_x {
            grads.register::<B>(node.id, x);
        }
        if let (Some(node), Some(rows)) = (for_bias, bias)
            && let Some(gradient) = bias_gradient::<B>(rows, dtype, main_grad.as_ref())
        {
            grads.register::<B>(node.id, gradient);
        }
    }
}

impl<B: ActivationOps + Activate + ColumnSum, C: CheckpointStrategy> ActivationOps
    for Autodiff<B, C>
{
    fn activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let input = ActivationInput {
            x,
            bias: None,
            weight: None,
        };
        let y = B::forward(activation, input.clone());
        match ActivationBackward
            .prepare::<C>([for_x])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((activation, input), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }

    fn biased_activation(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        how: Biased,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (bias, for_bias) = bias.into_parts();
        let dtype = bias.dtype();
        let input = ActivationInput {
            x,
            bias: Some(bias),
            weight: None,
        };
        let y = B::forward(how.activation, input.clone());
        match BiasedBackward
            .prepare::<C>([for_x, for_bias])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((how, input, dtype), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }

    fn weighted_activation(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (weight, for_weight) = weight.into_parts();
        let input = ActivationInput {
            x,
            bias: None,
            weight: Some(weight),
        };
        let y = B::forward(activation, input.clone());
        match ActivationBackward
            .prepare::<C>([for_x, for_weight])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((activation, input), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }
}

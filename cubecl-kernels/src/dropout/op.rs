//! Dropout under automatic differentiation. The backward pass regenerates the mask of the forward
//! pass, so no tensor is saved for backward.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::DType;
use megaburn_autograd::on_every_backend;

use super::{Drop, DropoutInput, Mask};

// (`backend_extension` does not support optional tensors.)
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait DropoutOps: Backend {
    fn dropout(x: FloatTensor<Self>, mask: Mask) -> FloatTensor<Self>;

    /// `x` and `residual` have the same shape and dtype.
    fn dropout_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        mask: Mask,
    ) -> FloatTensor<Self>;

    /// `x` and `residual`: `[.., n]`, `bias: [n]`.
    fn bias_dropout_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        mask: Mask,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl DropoutOps {
        fn dropout(x: FloatTensor<Self>, mask: Mask) -> FloatTensor<Self> {
            Self::forward(&mask, DropoutInput { x, bias: None, residual: None })
        }

        fn dropout_add(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            mask: Mask,
        ) -> FloatTensor<Self> {
            Self::forward(&mask, DropoutInput { x, bias: None, residual: Some(residual) })
        }

        fn bias_dropout_add(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            mask: Mask,
        ) -> FloatTensor<Self> {
            Self::forward(&mask, DropoutInput { x, bias: Some(bias), residual: Some(residual) })
        }
    }
}

/// Backward of dropout; the parents are `x` and, if present, the residual and the bias.
#[derive(Debug)]
struct DropoutBackward;

impl<B: Drop, const N: usize> Backward<B, N> for DropoutBackward {
    /// The last element is the dtype of the bias, if there is one.
    type State = (Mask, Option<DType>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (mask, bias) = ops.state;
        let (dx, dbias) = B::backward(&mask, dy.clone(), bias);
        for (parent, gradient) in ops.parents.into_iter().zip([Some(dx), Some(dy), dbias]) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: DropoutOps + Drop, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
    fn dropout(x: FloatTensor<Self>, mask: Mask) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let y = B::dropout(x, mask.clone());
        match DropoutBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((mask, None), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }

    fn dropout_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        mask: Mask,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (residual, for_residual) = residual.into_parts();
        let y = B::dropout_add(x, residual, mask.clone());
        match DropoutBackward
            .prepare::<C>([for_x, for_residual])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((mask, None), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }

    fn bias_dropout_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        mask: Mask,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (residual, for_residual) = residual.into_parts();
        let (bias, for_bias) = bias.into_parts();
        let dtype = bias.dtype();
        let y = B::bias_dropout_add(x, residual, bias, mask.clone());
        let nodes = [for_x, for_residual, for_bias];
        match DropoutBackward
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((mask, Some(dtype)), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }
}

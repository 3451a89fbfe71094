//! Sums under automatic differentiation.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::Shape;
use megaburn_autograd::backend_ops::{cast, compute_dtype};
use megaburn_autograd::on_every_backend;

use crate::bias::ColumnSum;

/// The sum of a column, with the best implementation per backend.
pub(crate) trait SumAll: Backend {
    /// `[count, 1]` to `[1]`.
    fn sum_all(column: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl SumAll for burn::backend::Flex {
    fn sum_all(column: FloatTensor<Self>) -> FloatTensor<Self> {
        let count = column.shape()[0];
        let dtype = column.dtype();
        let row = cast::<Self>(column, compute_dtype(dtype));
        let row = Self::float_reshape(row, Shape::from([1, count]));
        let sum = Self::float_reshape(Self::float_sum_dim(row, 1), Shape::from([1]));
        cast::<Self>(sum, dtype.into())
    }
}

#[cfg(feature = "cuda")]
impl SumAll for burn::backend::Cube {
    fn sum_all(column: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = column.dtype();
        Self::float_reshape(Self::column_sum(column, 1, dtype), Shape::from([1]))
    }
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait SumOps: Backend {
    /// `[..]` to `[1]`.
    fn sum_of_all(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `[rows, n]` to `[1, n]`.
    fn sum_of_columns(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

on_every_backend! {
    impl SumOps {
        fn sum_of_all(x: FloatTensor<Self>) -> FloatTensor<Self> {
            let count = x.shape().num_elements();
            Self::sum_all(Self::float_reshape(x, Shape::from([count, 1])))
        }

        fn sum_of_columns(x: FloatTensor<Self>) -> FloatTensor<Self> {
            let dtype = x.dtype();
            Self::column_sum(x, 1, dtype)
        }
    }
}

#[derive(Debug)]
struct SumBackward;

impl<B: SumOps> Backward<B, 1> for SumBackward {
    /// The shape of `x`.
    type State = Shape;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let shape = ops.state;
        let [parent] = ops.parents;
        if let Some(node) = parent {
            // The gradient of `sum_all` is one number, the gradient of `sum_columns` a row.
            let dims = shape.num_dims();
            let mut row = vec![1; dims];
            row[dims - 1] = dy.shape().num_elements();
            let dx = B::float_expand(B::float_reshape(dy, Shape::from(row)), shape);
            grads.register::<B>(node.id, dx);
        }
    }
}

impl<B: SumOps, C: CheckpointStrategy> SumOps for Autodiff<B, C> {
    fn sum_of_all(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let shape = x.shape();
        match SumBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish(shape, B::sum_of_all(x)),
            OpsKind::UnTracked(op) => op.finish(B::sum_of_all(x)),
        }
    }

    fn sum_of_columns(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let shape = x.shape();
        match SumBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish(shape, B::sum_of_columns(x)),
            OpsKind::UnTracked(op) => op.finish(B::sum_of_columns(x)),
        }
    }
}

//! Repeating a head under automatic differentiation. (The gradient of Burn's own `expand` uses a
//! generic reduction kernel.)

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::Shape;
use megaburn_autograd::on_every_backend;

use crate::bias::ColumnSum;

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait RepeatOps: Backend {
    /// `[s, b, 1, d]` to `[s, b, heads, d]`.
    fn repeated(x: FloatTensor<Self>, heads: usize) -> FloatTensor<Self>;
}

on_every_backend! {
    impl RepeatOps {
        fn repeated(x: FloatTensor<Self>, heads: usize) -> FloatTensor<Self> {
            let [s, b, _, d] = x.shape().dims();
            Self::float_expand(x, Shape::from([s, b, heads, d]))
        }
    }
}

#[derive(Debug)]
struct RepeatBackward;

impl<B: RepeatOps + ColumnSum> Backward<B, 1> for RepeatBackward {
    /// The shape of `x`.
    type State = Shape;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let shape = ops.state;
        let [parent] = ops.parents;
        if let Some(node) = parent {
            let [s, b, _, _] = shape.dims();
            let dtype = dy.dtype();
            let dx = B::float_reshape(B::column_sum(dy, s * b, dtype), shape);
            grads.register::<B>(node.id, dx);
        }
    }
}

impl<B: RepeatOps + ColumnSum, C: CheckpointStrategy> RepeatOps for Autodiff<B, C> {
    fn repeated(x: FloatTensor<Self>, heads: usize) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let shape = x.shape();
        match RepeatBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish(shape, B::repeated(x, heads)),
            OpsKind::UnTracked(op) => op.finish(B::repeated(x, heads)),
        }
    }
}

//! Dropout on a backend's primitives: the backward multiplies by the forward's mask.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::TensorData;

use super::DropoutKey;
use crate::backends::on_every_backend;
use crate::primitive::{cast, compute_dtype};

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait DropoutOps: Backend {
    fn dropout(x: FloatTensor<Self>, p: f64, key: DropoutKey) -> FloatTensor<Self>;
}

on_every_backend! {
    impl DropoutOps {
        fn dropout(x: FloatTensor<Self>, p: f64, key: DropoutKey) -> FloatTensor<Self> {
            let factors = factors::<Self>(&x, p, &key);
            apply::<Self>(x, factors)
        }
    }
}

fn factors<B: Backend>(x: &FloatTensor<B>, p: f64, key: &DropoutKey) -> FloatTensor<B> {
    let data = TensorData::new(key.factors(&x.shape(), p), x.shape());
    cast::<B>(B::float_from_data(data, &x.device()), compute_dtype(x.dtype()))
}

fn apply<B: Backend>(x: FloatTensor<B>, factors: FloatTensor<B>) -> FloatTensor<B> {
    let (dtype, wide) = (x.dtype(), factors.dtype());
    cast::<B>(B::float_mul(cast::<B>(x, wide.into()), factors), dtype.into())
}

#[derive(Debug)]
struct DropoutBackward;

impl<B: DropoutOps> Backward<B, 1> for DropoutBackward {
    /// The factors of the forward.
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [parent] = ops.parents;
        let dy = grads.consume::<B>(&ops.node);
        if let Some(node) = parent {
            grads.register::<B>(node.id, apply::<B>(dy, ops.state));
        }
    }
}

impl<B: DropoutOps, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
    fn dropout(x: FloatTensor<Self>, p: f64, key: DropoutKey) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        match DropoutBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(op) => {
                let factors = factors::<B>(&x, p, &key);
                let y = apply::<B>(x, factors.clone());
                op.finish(factors, y)
            }
            OpsKind::UnTracked(op) => op.finish(B::dropout(x, p, key)),
        }
    }
}

//! The rotation on a backend's primitives, with its backward.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};

use crate::backends::on_every_backend;
use crate::primitive::{cast, compute_dtype, halves};

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait RopeOps: Backend {
    /// `x: [s, b, h, d]`, `cos, sin: [s, 1, 1, d / 2]`.
    fn rope(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl RopeOps {
        fn rope(
            x: FloatTensor<Self>,
            cos: FloatTensor<Self>,
            sin: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            Self::rotate(x, cos, sin, Turn::Forward)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Turn {
    Forward,
    Back,
}

/// The rotation, as each backend computes it best.
pub(crate) trait Rotate: Backend {
    /// `x: [s, b, h, d]`, `cos, sin: [s, 1, 1, d / 2]`.
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self> {
        composed::<Self>(x, cos, sin, turn)
    }
}

#[cfg(feature = "flex")]
impl Rotate for burn::backend::Flex {}

pub(super) fn composed<B: Backend>(
    x: FloatTensor<B>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    turn: Turn,
) -> FloatTensor<B> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let (cos, sin) = (cast::<B>(cos, wide), cast::<B>(sin, wide));
    let (first, second) = halves::<B>(cast::<B>(x, wide));
    let first_cos = B::float_mul(first.clone(), cos.clone());
    let second_cos = B::float_mul(second.clone(), cos);
    let first_sin = B::float_mul(first, sin.clone());
    let second_sin = B::float_mul(second, sin);
    let (first, second) = match turn {
        Turn::Forward => (B::float_sub(first_cos, second_sin), B::float_add(second_cos, first_sin)),
        Turn::Back => (B::float_add(first_cos, second_sin), B::float_sub(second_cos, first_sin)),
    };
    cast::<B>(B::float_cat(vec![first, second], 3), dtype.into())
}

#[derive(Debug)]
struct RopeBackward;

impl<B: Rotate> Backward<B, 1> for RopeBackward {
    /// `cos` and `sin`.
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [parent] = ops.parents;
        let dy = grads.consume::<B>(&ops.node);
        let (cos, sin) = ops.state;
        if let Some(node) = parent {
            grads.register::<B>(node.id, B::rotate(dy, cos, sin, Turn::Back));
        }
    }
}

impl<B: RopeOps + Rotate, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    fn rope(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        let y = B::rope(x, cos.clone(), sin.clone());
        match RopeBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish((cos, sin), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }
}

//! SwiGLU on a backend's primitives, with its backward.
//!
//! With `s = sigmoid(gate)` and `t = gate * s`: `y = t * up`, `dup = dy * t`,
//! `dgate = dy * up * (s + t - t * s)`.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};

use crate::backends::on_every_backend;
use crate::primitive::{cast, compute_dtype, halves, rows};

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait SwigluOps: Backend {
    /// `[.., 2f]` to `[.., f]`.
    fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self>;
}

on_every_backend! {
    impl SwigluOps {
        fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
            let (shape, dtype) = (gate_up.shape(), gate_up.dtype());
            let gate_up = wide_rows::<Self>(gate_up);
            let sigmoid = sigmoid_of_gate::<Self>(gate_up.clone());
            product::<Self>(gate_up, sigmoid, shape, dtype)
        }
    }
}

#[derive(Clone, Debug)]
struct Saved<T> {
    gate_up: T,
    sigmoid: T,
    dtype: DType,
}

fn wide_rows<B: Backend>(gate_up: FloatTensor<B>) -> FloatTensor<B> {
    let wide = compute_dtype(gate_up.dtype());
    cast::<B>(rows::<B>(gate_up), wide)
}

fn sigmoid_of_gate<B: Backend>(gate_up: FloatTensor<B>) -> FloatTensor<B> {
    B::sigmoid(halves::<B>(gate_up).0)
}

/// `gate * sigmoid * up`, in place of `sigmoid` where nobody else holds it; `shape` is the input's.
fn product<B: Backend>(
    gate_up: FloatTensor<B>,
    sigmoid: FloatTensor<B>,
    mut shape: Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let (gate, up) = halves::<B>(gate_up);
    let y = B::float_mul(B::float_mul(gate, sigmoid), up);
    let last = shape.num_dims() - 1;
    shape[last] /= 2;
    B::float_reshape(cast::<B>(y, dtype.into()), shape)
}

#[derive(Debug)]
struct SwigluBackward;

impl<B: SwigluOps> Backward<B, 1> for SwigluBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [parent] = ops.parents;
        let dy = grads.consume::<B>(&ops.node);
        let Saved { gate_up, sigmoid, dtype } = ops.state;
        let mut shape = dy.shape();
        let dy = cast::<B>(rows::<B>(dy), gate_up.dtype().into());
        let (gate, up) = halves::<B>(gate_up);
        let silu = B::float_mul(gate, sigmoid.clone());
        let curve = B::float_mul(silu.clone(), sigmoid.clone());
        let slope = B::float_add(B::float_sub(silu.clone(), curve), sigmoid);
        let dgate = B::float_mul(B::float_mul(slope, up), dy.clone());
        let dup = B::float_mul(silu, dy);
        let last = shape.num_dims() - 1;
        shape[last] *= 2;
        let dx = cast::<B>(B::float_cat(vec![dgate, dup], 1), dtype.into());
        if let Some(node) = parent {
            grads.register::<B>(node.id, B::float_reshape(dx, shape));
        }
    }
}

impl<B: SwigluOps, C: CheckpointStrategy> SwigluOps for Autodiff<B, C> {
    fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        let (gate_up, node) = gate_up.into_parts();
        match SwigluBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(op) => {
                let (shape, dtype) = (gate_up.shape(), gate_up.dtype());
                let gate_up = wide_rows::<B>(gate_up);
                let sigmoid = sigmoid_of_gate::<B>(gate_up.clone());
                let y = product::<B>(gate_up.clone(), sigmoid.clone(), shape, dtype);
                op.finish(Saved { gate_up, sigmoid, dtype }, y)
            }
            OpsKind::UnTracked(op) => op.finish(B::swiglu(gate_up)),
        }
    }
}

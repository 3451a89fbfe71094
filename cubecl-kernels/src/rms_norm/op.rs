//! RMS norm on a backend's primitives, with its backward.
//!
//! With `n = x / rms` and `g = dy * gamma`: `dgamma = sum_rows(dy * n)`,
//! `dx = (g - n * mean(g * n)) / rms`.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};

use crate::backends::on_every_backend;
use crate::primitive::{cast, compute_dtype, row, rows, sum_rows};

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait RmsNormOps: Backend {
    /// `x: [.., n]`, `gamma: [n]`.
    fn rms_norm(x: FloatTensor<Self>, gamma: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self>;
}

on_every_backend! {
    impl RmsNormOps {
        fn rms_norm(x: FloatTensor<Self>, gamma: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
            let (shape, dtype) = (x.shape(), x.dtype());
            let (n, _) = normalize::<Self>(x, epsilon);
            scale::<Self>(n, gamma, shape, dtype)
        }
    }
}

/// `x / rms` as `[rows, n]` and `rms` as `[rows, 1]`, both in the compute dtype.
///
/// The order of the operations is that of `burn::nn::RmsNorm`, for equal bits.
fn normalize<B: Backend>(x: FloatTensor<B>, epsilon: f64) -> (FloatTensor<B>, FloatTensor<B>) {
    let wide = compute_dtype(x.dtype());
    let x = cast::<B>(rows::<B>(x), wide);
    let mean = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let rms = B::float_sqrt(B::float_add_scalar(mean, epsilon.into()));
    (B::float_div(x, rms.clone()), rms)
}

fn scale<B: Backend>(
    n: FloatTensor<B>,
    gamma: FloatTensor<B>,
    shape: Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let gamma = row::<B>(gamma, n.dtype().into());
    B::float_reshape(cast::<B>(B::float_mul(n, gamma), dtype.into()), shape)
}

#[derive(Clone, Debug)]
struct Saved<T> {
    n: T,
    rms: T,
    gamma: T,
    dtype: DType,
}

#[derive(Debug)]
struct RmsNormBackward;

impl<B: RmsNormOps> Backward<B, 2> for RmsNormBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [for_x, for_gamma] = ops.parents;
        let dy = grads.consume::<B>(&ops.node);
        let Saved { n, rms, gamma, dtype } = ops.state;
        let (shape, wide) = (dy.shape(), n.dtype());
        let dy = cast::<B>(rows::<B>(dy), wide.into());
        let dy_n = B::float_mul(n.clone(), dy.clone());
        if let Some(node) = for_gamma {
            grads.register::<B>(node.id, sum_rows::<B>(dy_n.clone(), gamma.dtype()));
        }
        if let Some(node) = for_x {
            let gamma = row::<B>(gamma, wide.into());
            let mean = B::float_mean_dim(B::float_mul(dy_n, gamma.clone()), 1);
            let g = B::float_mul(dy, gamma);
            let dx = B::float_div(B::float_sub(g, B::float_mul(n, mean)), rms);
            let dx = B::float_reshape(cast::<B>(dx, dtype.into()), shape);
            grads.register::<B>(node.id, dx);
        }
    }
}

impl<B: RmsNormOps, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_norm(x: FloatTensor<Self>, gamma: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        let ((x, for_x), (gamma, for_gamma)) = (x.into_parts(), gamma.into_parts());
        match RmsNormBackward.prepare::<C>([for_x, for_gamma]).compute_bound().stateful() {
            OpsKind::Tracked(op) => {
                let (shape, dtype) = (x.shape(), x.dtype());
                let (n, rms) = normalize::<B>(x, epsilon);
                let y = scale::<B>(n.clone(), gamma.clone(), shape, dtype);
                op.finish(Saved { n, rms, gamma, dtype }, y)
            }
            OpsKind::UnTracked(op) => op.finish(B::rms_norm(x, gamma, epsilon)),
        }
    }
}

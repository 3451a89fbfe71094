//! Layer norm on a backend's primitives, with its backward.
//!
//! With `n = (x - mean) / deviation` and `g = dy * gamma`: `dbeta = sum_rows(dy)`,
//! `dgamma = sum_rows(dy * n)`, `dx = (g - mean(g) - n * mean(g * n)) / deviation`.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::DType;

use crate::backends::on_every_backend;
use crate::primitive::{cast, compute_dtype, row, rows, sum_rows};

// (`layer_norm` is a method of Burn's `ModuleOps`, and the macro takes no optional tensors.)
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait LayerNormOps: Backend {
    /// `x: [.., n]`, `gamma: [n]`.
    fn scaled_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    /// `x: [.., n]`, `gamma, beta: [n]`.
    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl LayerNormOps {
        fn scaled_norm(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            epsilon: f64,
        ) -> FloatTensor<Self> {
            fused::<Self>(x, gamma, None, epsilon)
        }

        fn affine_norm(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            epsilon: f64,
        ) -> FloatTensor<Self> {
            fused::<Self>(x, gamma, Some(beta), epsilon)
        }
    }
}

/// The backend's own loop, the one that `burn::nn::LayerNorm` runs.
fn fused<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: Option<FloatTensor<B>>,
    epsilon: f64,
) -> FloatTensor<B> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let [x, gamma] = [x, gamma].map(|t| cast::<B>(t, wide));
    let beta = beta.map(|beta| cast::<B>(beta, wide));
    cast::<B>(B::layer_norm(x, gamma, beta, epsilon), dtype.into())
}

/// What the backward reads, in the compute dtype.
#[derive(Clone, Debug)]
struct Saved<T> {
    /// `[rows, n]`.
    n: T,
    /// `[rows, 1]`.
    deviation: T,
    gamma: T,
    dtype: DType,
}

/// The norm, operation by operation in the order of Burn's composed one, for equal bits.
fn composed<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: Option<FloatTensor<B>>,
    epsilon: f64,
) -> (FloatTensor<B>, Saved<FloatTensor<B>>) {
    let (shape, dtype, wide) = (x.shape(), x.dtype(), compute_dtype(x.dtype()));
    let x = cast::<B>(rows::<B>(x), wide);
    let mean = B::float_mean_dim(x.clone(), 1);
    let centered = B::float_sub(x, mean);
    let variance = B::float_mean_dim(B::float_mul(centered.clone(), centered.clone()), 1);
    let deviation = B::float_sqrt(B::float_add_scalar(variance, epsilon.into()));
    let n = B::float_div(centered, deviation.clone());
    let y = B::float_mul(n.clone(), row::<B>(gamma.clone(), wide));
    let y = match beta {
        Some(beta) => B::float_add(y, row::<B>(beta, wide)),
        None => y,
    };
    let y = B::float_reshape(cast::<B>(y, dtype.into()), shape);
    (y, Saved { n, deviation, gamma, dtype })
}

/// The gradient's `[rows, n]` in the compute dtype, after registering those of `x` and `gamma`.
fn register<B: Backend>(
    dy: FloatTensor<B>,
    saved: Saved<FloatTensor<B>>,
    [for_x, for_gamma]: [Option<NodeId>; 2],
    grads: &mut Gradients,
) -> FloatTensor<B> {
    let Saved { n, deviation, gamma, dtype } = saved;
    let (shape, wide) = (dy.shape(), n.dtype());
    let dy = cast::<B>(rows::<B>(dy), wide.into());
    let dy_n = B::float_mul(n.clone(), dy.clone());
    if let Some(id) = for_gamma {
        grads.register::<B>(id, sum_rows::<B>(dy_n.clone(), gamma.dtype()));
    }
    if let Some(id) = for_x {
        let gamma = row::<B>(gamma, wide.into());
        let mean_gn = B::float_mean_dim(B::float_mul(dy_n, gamma.clone()), 1);
        let g = B::float_mul(dy.clone(), gamma);
        let mean_g = B::float_mean_dim(g.clone(), 1);
        let dx = B::float_sub(B::float_sub(g, mean_g), B::float_mul(n, mean_gn));
        let dx = B::float_div(dx, deviation);
        grads.register::<B>(id, B::float_reshape(cast::<B>(dx, dtype.into()), shape));
    }
    dy
}

#[derive(Debug)]
struct NormBackward;

impl<B: LayerNormOps> Backward<B, 2> for NormBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        register::<B>(dy, ops.state, ops.parents.map(|node| node.map(|n| n.id)), grads);
    }
}

#[derive(Debug)]
struct AffineNormBackward;

impl<B: LayerNormOps> Backward<B, 3> for AffineNormBackward {
    /// What the norm needs, and the dtype of `beta`.
    type State = (Saved<FloatTensor<B>>, DType);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [for_x, for_gamma, for_beta] = ops.parents.map(|node| node.map(|n| n.id));
        let dy = grads.consume::<B>(&ops.node);
        let (saved, dtype) = ops.state;
        let dy = register::<B>(dy, saved, [for_x, for_gamma], grads);
        if let Some(id) = for_beta {
            grads.register::<B>(id, sum_rows::<B>(dy, dtype));
        }
    }
}

impl<B: LayerNormOps, C: CheckpointStrategy> LayerNormOps for Autodiff<B, C> {
    fn scaled_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let ((x, for_x), (gamma, for_gamma)) = (x.into_parts(), gamma.into_parts());
        let (y, saved) = composed::<B>(x, gamma, None, epsilon);
        match NormBackward.prepare::<C>([for_x, for_gamma]).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish(saved, y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }

    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let ((x, for_x), (gamma, for_gamma)) = (x.into_parts(), gamma.into_parts());
        let (beta, for_beta) = beta.into_parts();
        let dtype = beta.dtype();
        let (y, saved) = composed::<B>(x, gamma, Some(beta), epsilon);
        let nodes = [for_x, for_gamma, for_beta];
        match AffineNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish((saved, dtype), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }
}

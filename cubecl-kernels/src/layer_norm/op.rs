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
use burn::tensor::{DType, Shape};

use crate::primitive::{cast, compute_dtype, row, rows, sum_rows};

#[backend_extension(Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait LayerNormOps: Backend {
    /// `x: [.., n]`, `gamma, beta: [n]`. (`layer_norm` is taken by Burn's `ModuleOps`.)
    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl LayerNormOps for burn::backend::Flex {
    /// Flex's own fused loop, the one `burn::nn::LayerNorm` runs.
    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        use burn::backend::ops::ModuleOps;
        let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
        let x = cast::<Self>(x, wide);
        let gamma = cast::<Self>(gamma, wide);
        let beta = beta.map(|beta| cast::<Self>(beta, wide));
        cast::<Self>(<Self as ModuleOps<Self>>::layer_norm(x, gamma, beta, epsilon), dtype.into())
    }
}

/// The normalised input as `[rows, n]` and the deviation as `[rows, 1]`, in the compute dtype.
///
/// The order of the operations is that of Burn's composed layer norm, for equal bits.
fn normalize<B: Backend>(x: FloatTensor<B>, epsilon: f64) -> (FloatTensor<B>, FloatTensor<B>) {
    let wide = compute_dtype(x.dtype());
    let x = cast::<B>(rows::<B>(x), wide);
    let mean = B::float_mean_dim(x.clone(), 1);
    let centered = B::float_sub(x, mean);
    let variance = B::float_mean_dim(B::float_mul(centered.clone(), centered.clone()), 1);
    let deviation = B::float_sqrt(B::float_add_scalar(variance, epsilon.into()));
    (B::float_div(centered, deviation.clone()), deviation)
}

fn affine<B: Backend>(
    n: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: Option<FloatTensor<B>>,
    shape: Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let wide = n.dtype();
    let y = B::float_mul(n, row::<B>(gamma, wide.into()));
    let y = match beta {
        Some(beta) => B::float_add(y, row::<B>(beta, wide.into())),
        None => y,
    };
    B::float_reshape(cast::<B>(y, dtype.into()), shape)
}

#[derive(Clone, Debug)]
struct Saved<T> {
    n: T,
    deviation: T,
    gamma: T,
    dtype: DType,
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
    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let ((x, for_x), (gamma, for_gamma)) = (x.into_parts(), gamma.into_parts());
        let (shape, dtype) = (x.shape(), x.dtype());
        let (n, deviation) = normalize::<B>(x, epsilon);
        let saved = Saved { n: n.clone(), deviation, gamma: gamma.clone(), dtype };
        match beta.map(|beta| beta.into_parts()) {
            None => {
                let y = affine::<B>(n, gamma, None, shape, dtype);
                match NormBackward.prepare::<C>([for_x, for_gamma]).compute_bound().stateful() {
                    OpsKind::Tracked(op) => op.finish(saved, y),
                    OpsKind::UnTracked(op) => op.finish(y),
                }
            }
            Some((beta, for_beta)) => {
                let saved = (saved, beta.dtype());
                let y = affine::<B>(n, gamma, Some(beta), shape, dtype);
                let nodes = [for_x, for_gamma, for_beta];
                match AffineNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
                    OpsKind::Tracked(op) => op.finish(saved, y),
                    OpsKind::UnTracked(op) => op.finish(y),
                }
            }
        }
    }
}

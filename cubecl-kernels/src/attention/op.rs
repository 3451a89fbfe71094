//! Attention on a backend's primitives, with its backward.
//!
//! The query heads that share keys are laid side by side as rows, `[b, hkv, r, d]` with
//! `r = (hq / hkv) * s_q`, so that one product serves the group; keys and values are permuted
//! views. With `P` the probabilities, `O = P V` and `E = rowsum(dO * O)`: `dV = P^T dO`,
//! `dS = P * (dO V^T - E)`, `dQ = dS K * scale`, `dK = dS^T Q * scale`.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape, TensorData};

use super::AttentionOptions;
use crate::primitive::{cast, compute_dtype};

#[backend_extension(Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait AttentionOps: Backend {
    /// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` to
    /// `[s_q, b, hq * d_v]`. (`attention` is taken by Burn's `ModuleOps`.)
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl AttentionOps for burn::backend::Flex {
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        forward::<Self>(q, k, v, &options).0
    }
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    s_q: usize,
    b: usize,
    hkv: usize,
    group: usize,
}

impl Sizes {
    /// `[s_q, b, hq, d]` (or `[s_q, b, hq * d]`) to rows, `[b, hkv, group * s_q, d]`.
    fn fold<B: Backend>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        let Self { s_q, b, hkv, group } = self;
        let d = x.shape().num_elements() / (s_q * b * hkv * group).max(1);
        let x = B::float_reshape(x, Shape::from([s_q, b, hkv, group, d]));
        let x = B::float_permute(x, &[1, 2, 3, 0, 4]);
        B::float_reshape(x, Shape::from([b, hkv, group * s_q, d]))
    }

    /// Rows to a view of `[s_q, b, hkv, group, d]`.
    fn unfold<B: Backend>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        let Self { s_q, b, hkv, group } = self;
        let d = x.shape()[3];
        let x = B::float_reshape(x, Shape::from([b, hkv, group, s_q, d]));
        B::float_permute(x, &[3, 0, 1, 2, 4])
    }
}

/// `[s_k, b, hkv, d]` to a view of `[b, hkv, s_k, d]`.
fn by_head<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_permute(x, &[1, 2, 0, 3])
}

/// `[b, hkv, s_k, d]` to a view of `[s_k, b, hkv, d]`.
fn by_position<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_permute(x, &[2, 0, 1, 3])
}

fn transposed<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_swap_dims(x, 2, 3)
}

/// What the backward reads, in the compute dtype.
#[derive(Clone, Debug)]
struct Saved<T> {
    /// Times scale, `[b, hkv, r, d]`.
    q: T,
    /// `[b, hkv, s_k, d]`.
    k: T,
    /// `[b, hkv, s_k, d_v]`.
    v: T,
    /// `[b, hkv, r, s_k]`.
    probabilities: T,
    /// `[b, hkv, r, d_v]`.
    out: T,
    sizes: Sizes,
    scale: f64,
    dtypes: [DType; 3],
}

fn forward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Saved<FloatTensor<B>>) {
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    let wide = compute_dtype(dtypes[0]);
    let (q_shape, k_shape) = (q.shape(), k.shape());
    let sizes =
        Sizes { s_q: q_shape[0], b: q_shape[1], hkv: k_shape[2], group: q_shape[2] / k_shape[2] };
    let scale = options.factor(q_shape[3]);
    let q = B::float_mul_scalar(sizes.fold::<B>(cast::<B>(q, wide)), scale.into());
    let k = by_head::<B>(cast::<B>(k, wide));
    let v = by_head::<B>(cast::<B>(v, wide));
    let scores = B::float_matmul(q.clone(), transposed::<B>(k.clone()));
    let probabilities = softmax_visible::<B>(scores, options, sizes);
    let out = B::float_matmul(probabilities.clone(), v.clone());
    let y = cast::<B>(sizes.unfold::<B>(out.clone()), dtypes[0].into());
    let width = y.shape()[2] * y.shape()[3] * y.shape()[4];
    let y = B::float_reshape(y, Shape::from([sizes.s_q, sizes.b, width]));
    (y, Saved { q, k, v, probabilities, out, sizes, scale, dtypes })
}

/// Softmax of `[b, hkv, group * s_q, s_k]` over the keys that each query sees.
fn softmax_visible<B: Backend>(
    scores: FloatTensor<B>,
    options: &AttentionOptions,
    Sizes { s_q, .. }: Sizes,
) -> FloatTensor<B> {
    let shape = scores.shape();
    let s_k = shape[3];
    let visible: Vec<_> = (0..s_q).map(|i| options.visible(i, s_k)).collect();
    if s_k == 0 || visible.iter().all(|keys| keys.len() == s_k) {
        return B::softmax(scores, 3);
    }
    let (device, dtype) = (scores.device(), scores.dtype());
    let constant = |data: Vec<f32>, shape: [usize; 3]| {
        cast::<B>(B::float_from_data(TensorData::new(data, shape), &device), dtype.into())
    };
    // A query without keys keeps finite scores here, and loses its row afterwards.
    let mut bias = vec![0.0; s_q * s_k];
    for (row, keys) in bias.chunks_mut(s_k).zip(&visible).filter(|(_, keys)| !keys.is_empty()) {
        row[..keys.start].fill(f32::NEG_INFINITY);
        row[keys.end..].fill(f32::NEG_INFINITY);
    }
    let heads = shape.num_elements() / (s_q * s_k);
    let scores = B::float_reshape(scores, Shape::from([heads, s_q, s_k]));
    let mut probabilities = B::softmax(B::float_add(scores, constant(bias, [1, s_q, s_k])), 2);
    if visible.iter().any(|keys| keys.is_empty()) {
        let seeing = visible.iter().map(|keys| if keys.is_empty() { 0.0 } else { 1.0 }).collect();
        probabilities = B::float_mul(probabilities, constant(seeing, [1, s_q, 1]));
    }
    B::float_reshape(probabilities, shape)
}

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionOps> Backward<B, 3> for AttentionBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [for_q, for_k, for_v] = ops.parents;
        let dy = grads.consume::<B>(&ops.node);
        let Saved { q, k, v, probabilities, out, sizes, scale, dtypes } = ops.state;
        let dout = sizes.fold::<B>(cast::<B>(dy, out.dtype().into()));
        if let Some(node) = for_v {
            let dv = B::float_matmul(transposed::<B>(probabilities.clone()), dout.clone());
            let dv = cast::<B>(by_position::<B>(dv), dtypes[2].into());
            grads.register::<B>(node.id, dv);
        }
        if for_q.is_none() && for_k.is_none() {
            return;
        }
        let row_sums = B::float_sum_dim(B::float_mul(out, dout.clone()), 3);
        let dprobabilities = B::float_matmul(dout, transposed::<B>(v));
        let dscores = B::float_mul(B::float_sub(dprobabilities, row_sums), probabilities);
        if let Some(node) = for_q {
            let dq = B::float_mul_scalar(B::float_matmul(dscores.clone(), k), scale.into());
            let dq = cast::<B>(sizes.unfold::<B>(dq), dtypes[0].into());
            let [s_q, b, hkv, group, d] = dq.shape().dims();
            let dq = B::float_reshape(dq, Shape::from([s_q, b, hkv * group, d]));
            grads.register::<B>(node.id, dq);
        }
        if let Some(node) = for_k {
            // `q` carries the scale already.
            let dk = B::float_matmul(transposed::<B>(dscores), q);
            let dk = cast::<B>(by_position::<B>(dk), dtypes[1].into());
            grads.register::<B>(node.id, dk);
        }
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        let ((q, for_q), (k, for_k)) = (q.into_parts(), k.into_parts());
        let (v, for_v) = v.into_parts();
        match AttentionBackward.prepare::<C>([for_q, for_k, for_v]).compute_bound().stateful() {
            OpsKind::Tracked(op) => {
                let (y, saved) = forward::<B>(q, k, v, &options);
                op.finish(saved, y)
            }
            OpsKind::UnTracked(op) => op.finish(B::grouped_attention(q, k, v, options)),
        }
    }
}

//! Attention of a block of queries to the keys that the block sees, forward and backward.
//!
//! The query heads that share keys are laid side by side as rows, `[b, hkv, r, d]` with
//! `r = (hq / hkv) * queries`, so that one product serves the group; keys and values are permuted
//! views. With `P` the probabilities, `O = P V` and `E = rowsum(dO * O)`: `dV = P^T dO`,
//! `dS = P * (dO V^T - E)`, `dQ = dS K * scale`, `dK = dS^T Q * scale`.
//!
//! `E` is `rowsum(P * dO V^T)` too, with more rows to sum. Where a query sees a single key, that way
//! is taken: its score changes nothing, and only so is the gradient of it zero and not rounding.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice, TensorData};

use super::AttentionOptions;
use crate::primitive::cast;

/// Keys or values as a view of `[b, hkv, s_k, d]`, from `[s_k, b, hkv, d]`.
pub(super) fn by_head<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_permute(x, &[1, 2, 0, 3])
}

/// The inverse of [`by_head`].
pub(super) fn by_position<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_permute(x, &[2, 0, 1, 3])
}

/// `[s, b, hq, d]` (or `[s, b, hq * d]`) to rows.
fn fold<B: Backend>(x: FloatTensor<B>, hkv: usize, group: usize) -> FloatTensor<B> {
    let shape = x.shape();
    let (s, b) = (shape[0], shape[1]);
    let d = shape[2..].iter().product::<usize>() / (hkv * group);
    let x = B::float_reshape(x, Shape::from([s, b, hkv, group, d]));
    let x = B::float_permute(x, &[1, 2, 3, 0, 4]);
    B::float_reshape(x, Shape::from([b, hkv, group * s, d]))
}

/// Rows to `[s, b, hq, d]`.
fn unfold<B: Backend>(x: FloatTensor<B>, group: usize) -> FloatTensor<B> {
    let [b, hkv, rows, d] = x.shape().dims();
    let s = rows / group;
    let x = B::float_reshape(x, Shape::from([b, hkv, group, s, d]));
    let x = B::float_permute(x, &[3, 0, 1, 2, 4]);
    B::float_reshape(x, Shape::from([s, b, hkv * group, d]))
}

fn transposed<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_swap_dims(x, 2, 3)
}

/// `keys` out of `[b, hkv, s_k, d]`.
fn narrow<B: Backend>(x: FloatTensor<B>, keys: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x, &[Slice::full(), Slice::full(), Slice::from(keys.clone()), Slice::full()])
}

/// What the backward of one block reads.
#[derive(Clone, Debug)]
pub(super) struct Block<T> {
    queries: Range<usize>,
    /// Every key that some query of the block sees.
    keys: Range<usize>,
    /// Query heads per head of keys.
    group: usize,
    /// Whether some query sees a single key.
    single: bool,
    /// Times scale, `[b, hkv, r, d]`.
    q: T,
    /// `[b, hkv, r, keys]`.
    probabilities: T,
    /// `[b, hkv, r, d_v]`.
    out: T,
}

/// The gradients of one block.
pub(super) struct BlockGradients<T> {
    /// `[queries, b, hq, d]`.
    pub(super) q: T,
    /// The keys that `k` and `v` are for.
    pub(super) keys: Range<usize>,
    /// `[b, hkv, keys, d]`.
    pub(super) k: T,
    /// `[b, hkv, keys, d_v]`.
    pub(super) v: T,
}

/// Attention of `queries` out of `q: [s_q, b, hq, d]` to `k: [b, hkv, s_k, d]` and
/// `v: [b, hkv, s_k, d_v]`, all of one dtype; gives `[queries, b, hq, d_v]`.
pub(super) fn forward<B: Backend>(
    q: FloatTensor<B>,
    queries: Range<usize>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Block<FloatTensor<B>>) {
    let [_, hkv, s_k, d] = k.shape().dims();
    let group = q.shape()[2] / hkv;
    let keys = options.visible_to_any(queries.clone(), s_k);
    let q = B::float_slice(q, &[Slice::from(queries.clone())]);
    let q = B::float_mul_scalar(fold::<B>(q, hkv, group), options.factor(d).into());
    let scores = B::float_matmul(q.clone(), transposed::<B>(narrow::<B>(k, &keys)));
    let probabilities = softmax_visible::<B>(scores, &queries, &keys, s_k, options);
    let out = B::float_matmul(probabilities.clone(), narrow::<B>(v, &keys));
    let y = unfold::<B>(out.clone(), group);
    let single = queries.clone().any(|i| options.visible(i, s_k).len() == 1);
    (y, Block { queries, keys, group, single, q, probabilities, out })
}

/// Softmax of `[b, hkv, r, keys]` over the keys that each query sees.
fn softmax_visible<B: Backend>(
    scores: FloatTensor<B>,
    queries: &Range<usize>,
    keys: &Range<usize>,
    s_k: usize,
    options: &AttentionOptions,
) -> FloatTensor<B> {
    let visible: Vec<_> = queries.clone().map(|i| options.visible(i, s_k)).collect();
    if visible.iter().all(|v| v == keys) {
        return B::softmax(scores, 3);
    }
    let (shape, device, dtype) = (scores.shape(), scores.device(), scores.dtype());
    let constant = |data: Vec<f32>, shape: [usize; 3]| {
        cast::<B>(B::float_from_data(TensorData::new(data, shape), &device), dtype.into())
    };
    // A query without keys keeps finite scores here, and loses its row afterwards.
    let (s, n) = (queries.len(), keys.len());
    let mut bias = vec![0.0; s * n];
    for (row, seen) in bias.chunks_mut(n).zip(&visible).filter(|(_, seen)| !seen.is_empty()) {
        row[..seen.start - keys.start].fill(f32::NEG_INFINITY);
        row[seen.end - keys.start..].fill(f32::NEG_INFINITY);
    }
    let heads = shape.num_elements() / (s * n);
    let scores = B::float_reshape(scores, Shape::from([heads, s, n]));
    let mut probabilities = B::softmax(B::float_add(scores, constant(bias, [1, s, n])), 2);
    if visible.iter().any(Range::is_empty) {
        let seeing = visible.iter().map(|seen| if seen.is_empty() { 0.0 } else { 1.0 }).collect();
        probabilities = B::float_mul(probabilities, constant(seeing, [1, s, 1]));
    }
    B::float_reshape(probabilities, shape)
}

/// The gradients of a block, from `dy: [s_q, b, hq * d_v]` and the keys and values of the forward.
pub(super) fn backward<B: Backend>(
    block: Block<FloatTensor<B>>,
    dy: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    scale: f64,
) -> BlockGradients<FloatTensor<B>> {
    let Block { queries, keys, group, single, q, probabilities, out } = block;
    let (k, v) = (narrow::<B>(k, &keys), narrow::<B>(v, &keys));
    let dout = fold::<B>(B::float_slice(dy, &[Slice::from(queries)]), k.shape()[1], group);
    let dprobabilities = B::float_matmul(dout.clone(), transposed::<B>(v));
    let terms = match single {
        true => B::float_mul(probabilities.clone(), dprobabilities.clone()),
        false => B::float_mul(out, dout.clone()),
    };
    let row_sums = B::float_sum_dim(terms, 3);
    let dv = B::float_matmul(transposed::<B>(probabilities.clone()), dout);
    let dscores = B::float_mul(B::float_sub(dprobabilities, row_sums), probabilities);
    let dq = B::float_mul_scalar(B::float_matmul(dscores.clone(), k), scale.into());
    // `q` carries the scale already.
    let dk = B::float_matmul(transposed::<B>(dscores), q);
    BlockGradients { q: unfold::<B>(dq, group), keys, k: dk, v: dv }
}

/// Adds `part`, which is for `keys`, to a total over all `s_k` (`[b, hkv, s_k, d]`).
pub(super) fn accumulate<B: Backend>(
    total: Option<FloatTensor<B>>,
    part: FloatTensor<B>,
    keys: &Range<usize>,
    s_k: usize,
) -> FloatTensor<B> {
    let mut shape = part.shape();
    if total.is_none() && shape[2] == s_k {
        return part;
    }
    shape[2] = s_k;
    let total =
        total.unwrap_or_else(|| B::float_zeros(shape.clone(), &part.device(), part.dtype().into()));
    let sum = B::float_add(part, narrow::<B>(total.clone(), keys));
    let slices = [Slice::full(), Slice::full(), Slice::from(keys.clone()), Slice::full()];
    B::float_slice_assign(total, &slices, sum)
}

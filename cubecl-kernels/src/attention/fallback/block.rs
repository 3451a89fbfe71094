//! Attention of a block of queries to the keys that the block sees, forward and backward.
//!
//! The query heads that share a key head are concatenated as rows, `[b, hkv, r, d]` with
//! `r = (hq / hkv) * queries`, so that one product serves the group; keys and values are permuted
//! views. With `P` the probabilities, `O = P V` and `E = rowsum(dO * O)`: `dV = P^T dO`,
//! `dS = P * (dO V^T - E)`, `dQ = dS K * scale`, `dK = dS^T Q * scale`.
//!
//! `E` also equals `rowsum(P * dO V^T)`, with longer rows to sum. That form is used if some query
//! sees a single key: the score of that query has no influence, and only this form makes its
//! gradient exactly zero instead of a rounding error.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice, TensorData};
use megaburn_autograd::backend_ops::{cast, compute_dtype};

use super::distances;
use crate::attention::options::{AttentionDropout, AttentionOptions};
use crate::attention::scores::{Scores, Visible};
use crate::gemm_ops::{GemmOps, ProductOptions};

/// Keys or values as a view of `[b, hkv, s_k, d]`, from `[s_k, b, hkv, d]`.
pub(super) fn by_head<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_permute(x, &[1, 2, 0, 3])
}

/// The inverse of [`by_head`].
pub(super) fn by_position<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_permute(x, &[2, 0, 1, 3])
}

/// Folds `[s, b, hq, d]` (or `[s, b, hq * d]`) into rows `[b, hkv, r, d]`.
fn fold<B: Backend>(x: FloatTensor<B>, hkv: usize, group: usize) -> FloatTensor<B> {
    let shape = x.shape();
    let s = shape[0];
    let b = shape[1];
    let d = shape[2..].iter().product::<usize>() / (hkv * group);
    if group == 1 && shape.num_dims() == 4 {
        // A view: Flex's `reshape` would copy the heads, though the rows are already as they should be.
        return by_head::<B>(x);
    }
    let x = B::float_reshape(x, Shape::from([s, b, hkv, group, d]));
    let x = B::float_permute(x, &[1, 2, 3, 0, 4]);
    B::float_reshape(x, Shape::from([b, hkv, group * s, d]))
}

/// Unfolds rows into `[s, b, hq, d]`.
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

/// Slices the range `keys` of `[b, hkv, s_k, d]`.
fn narrow<B: Backend>(x: FloatTensor<B>, keys: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(
        x,
        &[
            Slice::full(),
            Slice::full(),
            Slice::from(keys.clone()),
            Slice::full(),
        ],
    )
}

/// What is saved for the backward pass of one block.
#[derive(Clone, Debug)]
pub(super) struct Block<T> {
    queries: Range<usize>,
    /// The range that covers the keys of all queries of the block.
    keys: Range<usize>,
    /// Query heads per key head.
    group: usize,
    /// Whether some query sees a single key.
    single: bool,
    /// Whether a bias was added to the scores.
    biased: bool,
    /// `[b, hkv, r, d]`.
    q: T,
    /// `[b, hkv, r, keys]`, before dropout.
    probabilities: T,
    /// The dropout factor of each probability, in the compute dtype, if there is dropout.
    kept: Option<T>,
    /// The derivative of the soft-capped scores by the uncapped ones, if there is a cap.
    slope: Option<T>,
    /// `[b, hkv, r, d_v]`.
    out: T,
}

impl<T> Block<T> {
    pub(super) fn queries(&self) -> Range<usize> {
        self.queries.clone()
    }
}

/// The gradients of one block.
pub(super) struct BlockGradients<T> {
    /// `[queries, b, hq, d]`.
    pub(super) q: T,
    /// The range of keys that `k` and `v` belong to.
    pub(super) keys: Range<usize>,
    /// `[b, hkv, keys, d]`.
    pub(super) k: T,
    /// `[b, hkv, keys, d_v]`.
    pub(super) v: T,
    /// `[hq, queries + keys - 1]` in the compute dtype, if there is a bias.
    pub(super) bias: Option<T>,
}

/// Attention of the range `queries` of `q: [s_q, b, hq, d]` to `k: [b, hkv, s_k, d]` and
/// `v: [b, hkv, s_k, d_v]`, all of one dtype; returns `[queries, b, hq, d_v]`. A bias is
/// `[hq, queries + keys - 1]` for the keys that the block sees, in the compute dtype.
///
/// Scores and softmax are in the compute dtype, probabilities in the dtype of the inputs.
pub(super) fn forward<B: GemmOps + Scores>(
    q: FloatTensor<B>,
    queries: Range<usize>,
    [k, v]: [FloatTensor<B>; 2],
    bias: Option<FloatTensor<B>>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Block<FloatTensor<B>>) {
    let [_, hkv, s_k, d] = k.shape().dims();
    let group = q.shape()[2] / hkv;
    let keys = options.visible_to_any(queries.clone(), s_k);
    let q = fold::<B>(
        B::float_slice(q, &[Slice::from(queries.clone())]),
        hkv,
        group,
    );
    let (dtype, wide) = (q.dtype().into(), compute_dtype(q.dtype()));
    let k = transposed::<B>(narrow::<B>(k, &keys));
    let scores = B::product(
        q.clone(),
        k,
        ProductOptions::new(wide).with_scale(options.factor(d)),
    );
    let (scores, slope) = match options.soft_cap {
        Some(cap) => capped::<B>(scores, cap),
        None => (scores, None),
    };
    let biased = bias.is_some();
    let scores = match bias {
        Some(bias) => distances::added::<B>(scores, bias, queries.len()),
        None => scores,
    };
    let kept = options.dropout.as_ref().map(|AttentionDropout { p, key }| {
        let [b, hkv, rows, keys_len] = scores.shape().dims();
        let key = key.clone().moved(2, queries.start).moved(3, keys.start);
        let factors = key.factors(&[b, hkv * group, rows / group, keys_len], *p);
        let factors = TensorData::new(factors, scores.shape());
        cast::<B>(B::float_from_data(factors, &scores.device()), wide)
    });
    let visible = Visible {
        queries: queries.clone(),
        keys: keys.clone(),
        s_k,
        options,
    };
    let probabilities = B::probabilities(scores, &visible, dtype);
    let left = dropped::<B>(probabilities.clone(), kept.as_ref());
    let out = B::product(left, narrow::<B>(v, &keys), ProductOptions::new(dtype));
    let y = unfold::<B>(out.clone(), group);
    let single = queries.clone().any(|i| options.visible(i, s_k).len() == 1);
    (
        y,
        Block {
            queries,
            keys,
            group,
            single,
            biased,
            q,
            probabilities,
            kept,
            slope,
            out,
        },
    )
}

/// `cap * tanh(x / cap)` and its derivative.
fn capped<B: Backend>(x: FloatTensor<B>, cap: f64) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let share = B::float_tanh(B::float_mul_scalar(x, (1.0 / cap).into()));
    let square = B::float_mul(share.clone(), share.clone());
    let slope = B::float_add_scalar(B::float_neg(square), 1.0.into());
    (B::float_mul_scalar(share, cap.into()), Some(slope))
}

/// `x` times the factors, if there are any, in the dtype of `x`.
fn dropped<B: Backend>(x: FloatTensor<B>, factors: Option<&FloatTensor<B>>) -> FloatTensor<B> {
    let Some(factors) = factors else { return x };
    let dtype = x.dtype().into();
    let x = cast::<B>(x, factors.dtype().into());
    cast::<B>(B::float_mul(x, factors.clone()), dtype)
}

/// The gradients of a block, from `dy: [s_q, b, hq, d_v]` and the forward pass's keys and values.
/// The gradients of keys and values are in the compute dtype, since blocks are summed.
pub(super) fn backward<B: GemmOps + Scores>(
    block: Block<FloatTensor<B>>,
    dy: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    scale: f64,
) -> BlockGradients<FloatTensor<B>> {
    let Block {
        queries,
        keys,
        group,
        single,
        biased,
        q,
        probabilities,
        kept,
        slope,
        out,
    } = block;
    let num_queries = queries.len();
    let (dtype, wide) = (q.dtype().into(), compute_dtype(q.dtype()));
    let k = narrow::<B>(k, &keys);
    let v = narrow::<B>(v, &keys);
    let dout = fold::<B>(
        B::float_slice(dy, &[Slice::from(queries)]),
        k.shape()[1],
        group,
    );
    let dprobabilities = B::product(dout.clone(), transposed::<B>(v), ProductOptions::new(wide));
    let dprobabilities = dropped::<B>(dprobabilities, kept.as_ref());
    let left = dropped::<B>(probabilities.clone(), kept.as_ref());
    let dv = B::product(
        transposed::<B>(left),
        dout.clone(),
        ProductOptions::new(wide),
    );
    let output = (!single).then_some((out, dout));
    let dscores = B::score_gradient(probabilities, dprobabilities, output);
    let dbias = biased.then(|| {
        let of_scores = cast::<B>(dscores.clone(), wide);
        distances::summed::<B>(of_scores, num_queries)
    });
    let dscores = cast::<B>(dropped::<B>(dscores, slope.as_ref()), dtype);
    let dq = B::product(
        dscores.clone(),
        k,
        ProductOptions::new(dtype).with_scale(scale),
    );
    let dk = B::product(
        transposed::<B>(dscores),
        q,
        ProductOptions::new(wide).with_scale(scale),
    );
    BlockGradients {
        q: unfold::<B>(dq, group),
        keys,
        k: dk,
        v: dv,
        bias: dbias,
    }
}

/// Adds `part`, the gradient of the range `keys`, to a total over all `s_k` (`[b, hkv, s_k, d]`).
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
    let slices = [
        Slice::full(),
        Slice::full(),
        Slice::from(keys.clone()),
        Slice::full(),
    ];
    B::float_slice_assign(total, &slices, sum)
}

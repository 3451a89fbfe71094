//! The operations between the products of attention: the softmax of the scores, and its gradient.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, TensorData};
use megaburn_autograd::backend_ops::cast;

use super::AttentionOptions;

/// Which keys the queries of a block see.
pub(super) struct Visible<'a> {
    pub(super) queries: Range<usize>,
    /// The range that covers the keys of all queries.
    pub(super) keys: Range<usize>,
    /// The total number of keys.
    pub(super) s_k: usize,
    pub(super) options: &'a AttentionOptions,
}

/// The softmax between the two products, by each backend's best implementation.
pub(crate) trait Scores: Backend {
    /// Softmax over the keys that each query sees, in `dtype`. A query without keys gives 0.
    ///
    /// # Shapes
    /// `scores: [b, hkv, r, keys]` in the compute dtype, contiguous; in `r` the queries of each
    /// head of the group are consecutive
    fn probabilities(
        scores: FloatTensor<Self>,
        visible: &Visible<'_>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        cast::<Self>(fallback_softmax::<Self>(scores, visible), dtype)
    }

    /// `P * (dP - rowsum(P * dP))`. The row sums equal those of `out * dout`, which are used if
    /// given.
    ///
    /// # Shapes
    /// `p, dp: [b, hkv, r, keys]`, `out, dout: [b, hkv, r, d_v]`; `dp` in the compute dtype
    fn score_gradient(
        p: FloatTensor<Self>,
        dp: FloatTensor<Self>,
        output: Option<(FloatTensor<Self>, FloatTensor<Self>)>,
    ) -> FloatTensor<Self> {
        fallback_gradient::<Self>(p, dp, output)
    }
}

#[cfg(feature = "flex")]
impl Scores for burn::backend::Flex {}

pub(super) fn fallback_gradient<B: Backend>(
    p: FloatTensor<B>,
    dp: FloatTensor<B>,
    output: Option<(FloatTensor<B>, FloatTensor<B>)>,
) -> FloatTensor<B> {
    let wide = dp.dtype().into();
    let p = cast::<B>(p, wide);
    let terms = match output {
        Some((out, dout)) => B::float_mul(cast::<B>(out, wide), cast::<B>(dout, wide)),
        None => B::float_mul(p.clone(), dp.clone()),
    };
    B::float_mul(B::float_sub(dp, B::float_sum_dim(terms, 3)), p)
}

pub(super) fn fallback_softmax<B: Backend>(
    scores: FloatTensor<B>,
    visible: &Visible<'_>,
) -> FloatTensor<B> {
    let Visible {
        queries,
        keys,
        s_k,
        options,
    } = visible;
    let visible: Vec<_> = queries.clone().map(|i| options.visible(i, *s_k)).collect();
    if visible.iter().all(|v| v == keys) {
        return B::softmax(scores, 3);
    }
    let shape = scores.shape();
    let device = scores.device();
    let dtype = scores.dtype();
    let constant = |data: Vec<f32>, shape: [usize; 3]| {
        cast::<B>(
            B::float_from_data(TensorData::new(data, shape), &device),
            dtype.into(),
        )
    };
    // A query without keys keeps finite scores here; its row is zeroed below.
    let s = queries.len();
    let n = keys.len();
    let mut bias = vec![0.0; s * n];
    for (row, seen) in bias
        .chunks_mut(n)
        .zip(&visible)
        .filter(|(_, seen)| !seen.is_empty())
    {
        row[..seen.start - keys.start].fill(f32::NEG_INFINITY);
        row[seen.end - keys.start..].fill(f32::NEG_INFINITY);
    }
    let heads = shape.num_elements() / (s * n);
    let scores = B::float_reshape(scores, Shape::from([heads, s, n]));
    let mut probabilities = B::softmax(B::float_add(scores, constant(bias, [1, s, n])), 2);
    if visible.iter().any(Range::is_empty) {
        let seeing = visible
            .iter()
            .map(|seen| if seen.is_empty() { 0.0 } else { 1.0 })
            .collect();
        probabilities = B::float_mul(probabilities, constant(seeing, [1, s, 1]));
    }
    B::float_reshape(probabilities, shape)
}

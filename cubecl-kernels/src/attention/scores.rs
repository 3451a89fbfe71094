//! The operations between the products of attention: the softmax of the scores, and its gradient.

use std::ops::Range;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;

use super::options::AttentionOptions;

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
    ) -> FloatTensor<Self>;

    /// `P * (dP - rowsum(P * dP))`. The row sums equal those of `out * dout`, which are used if
    /// given.
    ///
    /// # Shapes
    /// `p, dp: [b, hkv, r, keys]`, `out, dout: [b, hkv, r, d_v]`; `dp` in the compute dtype
    fn score_gradient(
        p: FloatTensor<Self>,
        dp: FloatTensor<Self>,
        output: Option<(FloatTensor<Self>, FloatTensor<Self>)>,
    ) -> FloatTensor<Self>;
}

use burn::tensor::Tensor;

/// The result of attention to some of the keys, with the LSE that is needed to merge it with
/// attention to others.
#[derive(Clone, Debug)]
pub struct PartialAttention {
    /// The result over these keys only, `[s_q, b, hq, d_v]`.
    pub out: Tensor<4>,
    /// The LSE of the scores, `[b, hq, s_q]` in f32 (f64 for f64); minus infinity for a query that
    /// sees no key.
    pub lse: Tensor<3>,
}

/// Replaces minus infinity where it would be subtracted from itself.
pub(super) const LOWEST: f64 = -1e30;

use burn::tensor::{Bool, Tensor};

/// Which scores are masked out.
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "made once per call and moved into it"
)]
pub enum SoftmaxMask {
    /// No score is masked out.
    None,
    /// Key `j` of query `i` is masked out if `j > i`.
    Causal,
    /// Scores are masked out where the mask is true: `[b or 1, h or 1, s_q, s_k]`, on a device
    /// without autodiff.
    Masked(Tensor<4, Bool>),
}

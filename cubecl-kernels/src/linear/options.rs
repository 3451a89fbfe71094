use megaburn_autograd::{MainGrad, RecomputeFn};

use crate::gemm_ops::GemmAlgorithm;
use crate::quantized::FoundAmaxes;

/// How [`linear`](crate::linear) reads its weight, where its gradients go, and whether the input is
/// recomputed.
#[derive(Clone, Debug, Default)]
pub struct LinearOptions {
    /// Whether the weight is `[out, in]` (Megatron, an embedding) instead of `[in, out]` (Burn).
    pub out_in: bool,
    /// Accumulates the weight's gradient once attached; `None` gives an ordinary gradient.
    pub main_grad: Option<MainGrad>,
    /// Accumulates the bias's gradient once attached, as `[1, out]`; `None` gives an ordinary
    /// gradient.
    pub bias_grad: Option<MainGrad>,
    /// Recomputes the input for the weight's gradient, its only use in backward; `None` saves the
    /// input.
    pub again: Option<RecomputeFn>,
    /// The algorithm of the products, in both passes.
    pub algorithm: GemmAlgorithm,
    /// The largest magnitudes of matrices that are [quantised](crate::quantized_linear), from the
    /// operations that make them.
    pub found: FoundAmaxes,
}

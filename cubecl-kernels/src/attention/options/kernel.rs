//! The choice of the attention implementation.

use std::fmt;

use burn::tensor::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The sequence length from which on cuDNN was faster, forward and backward, with causal heads of
/// 128 on an H200: `benches/results`.
pub const AUTO_LEN: usize = 1024;

/// The implementations of [`attention`](crate::attention).
///
/// - [`Auto`](Self::Auto) is chosen by what was measured: [`Cudnn`](Self::Cudnn) for sequences of
///   [`AUTO_LEN`] or more, if it supports the options.
/// - [`Cubecl`](Self::Cubecl) is one CubeCL kernel in forward and three or four in backward. It
///   needs NVIDIA GPUs with asynchronous copies (Ampere and later). Scores are never in memory.
/// - [`Cudnn`](Self::Cudnn) needs all keys visible or causal from the first, and falls back to
///   `Cubecl` if cuDNN is missing or does not support the options. Gradients of queries differ in
///   their last bits from run to run.
/// - [`Reference`](Self::Reference) runs on every device and dtype: products and a softmax, one
///   block of queries at a time. Memory grows with queries times keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum AttentionKernel {
    /// On GPUs, cuDNN for sequences of 1024 tokens and more where it is installed, the fused kernel
    /// otherwise, and composed operations where neither supports the type or the head size. The
    /// start of a run prints the choice.
    #[default]
    Auto,
    /// The fused kernel: on GPUs, in bf16 or f16, with head sizes that are multiples of 8 up to
    /// 256.
    Cubecl,
    /// cuDNN's engines, where cuDNN 9 is installed: the same limits as `cubecl`, but not
    /// deterministic.
    Cudnn,
    /// Composed tensor operations.
    Reference,
}

impl fmt::Display for AttentionKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cubecl => "cubecl",
            Self::Cudnn => "cudnn",
            Self::Reference => "reference",
        })
    }
}

impl AttentionKernel {
    /// This choice if its kernels support the dtype and head sizes on a GPU; otherwise
    /// [`Reference`](Self::Reference), as attention does with a choice that they do not support.
    /// `d` has one size, or two if values differ from keys.
    pub fn resolved(self, dtype: DType, d: &[usize]) -> Self {
        let fits = d
            .iter()
            .all(|d| d.is_multiple_of(8) && (8..=256).contains(d));
        if matches!(dtype, DType::BF16 | DType::F16) && fits {
            self
        } else {
            Self::Reference
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(AttentionKernel::Auto, DType::BF16, &[128], AttentionKernel::Auto)]
    #[case(AttentionKernel::Cubecl, DType::F16, &[192, 128], AttentionKernel::Cubecl)]
    #[case(AttentionKernel::Auto, DType::F32, &[128], AttentionKernel::Reference)]
    #[case(AttentionKernel::Cubecl, DType::BF16, &[100], AttentionKernel::Reference)]
    #[case(AttentionKernel::Auto, DType::BF16, &[264], AttentionKernel::Reference)]
    #[case(AttentionKernel::Reference, DType::BF16, &[64], AttentionKernel::Reference)]
    #[case(AttentionKernel::Cudnn, DType::BF16, &[64], AttentionKernel::Cudnn)]
    #[case(AttentionKernel::Cudnn, DType::F32, &[64], AttentionKernel::Reference)]
    fn the_kernel_is_taken_where_it_can(
        #[case] choice: AttentionKernel,
        #[case] dtype: DType,
        #[case] d: &[usize],
        #[case] expected: AttentionKernel,
    ) {
        assert_eq!(choice.resolved(dtype, d), expected);
    }
}

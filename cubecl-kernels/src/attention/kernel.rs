//! Which implementation attention takes.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use burn::tensor::DType;

/// Positions from which on cuDNN was faster forward and backward, of causal heads of 128 on an H200:
/// `benches/results`.
pub const AUTO_LEN: usize = 1024;

/// The implementations of [`attention`](crate::attention).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionKernel {
    /// By what was measured: [`Cudnn`](Self::Cudnn) for sequences of [`AUTO_LEN`] and more, where it is
    /// installed and serves; otherwise [`Cubecl`](Self::Cubecl) where it can,
    /// [`Reference`](Self::Reference) elsewhere.
    #[default]
    Auto,
    /// One CubeCL kernel forward and three or four backward, on NVIDIA GPUs that copy beside their
    /// work (Ampere and later): bf16 or f16, heads of a multiple of 8 up to 256. No scores in memory.
    Cubecl,
    /// cuDNN's engines, on NVIDIA GPUs where cuDNN 9 is installed: as [`Cubecl`](Self::Cubecl), all
    /// keys or causal from the first. What they cannot, or where there is no cuDNN, is `Cubecl`'s.
    /// Gradients of queries have other last bits each time.
    Cudnn,
    /// Products and a softmax, a block of queries at a time: every device and dtype. Memory grows
    /// with queries times keys.
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
    /// This choice if its kernels can do it on a GPU for heads of `d`, or of keys and values of two
    /// sizes; otherwise [`Reference`](Self::Reference).
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

static CHOICE: AtomicU8 = AtomicU8::new(AttentionKernel::Auto as u8);

/// Chooses for all of this process. Whether a kernel can is for the caller to ask
/// ([`AttentionKernel::resolved`]): what it cannot is composed.
pub fn set_attention_kernel(kernel: AttentionKernel) {
    CHOICE.store(kernel as u8, Ordering::Relaxed);
}

#[cfg(feature = "cuda")]
pub(super) fn chosen() -> AttentionKernel {
    use AttentionKernel::*;
    let choice = CHOICE.load(Ordering::Relaxed);
    [Auto, Cubecl, Cudnn, Reference]
        .into_iter()
        .find(|x| *x as u8 == choice)
        .unwrap_or_default()
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

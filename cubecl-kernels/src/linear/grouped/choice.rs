//! Chooses between one grouped GEMM and separate GEMMs.

use std::fmt;
#[cfg(feature = "cuda")]
use std::ops::Range;

/// Elements of a matrix up to which the products of all matrices are computed together. (Measured
/// with 1.6 and 3.1 million, which are faster together, and with 15 million, which are not:
/// `benches/results`.)
const MOST_ELEMENTS: usize = 4 << 20;

/// The mean multiplications per range from which on each product fills the GPU by itself and takes
/// longer than the host needs to launch it. (Measured with 0.8 billion, which are faster together,
/// and with 3.2, which are not.)
#[cfg(feature = "cuda")]
const MOST_TERMS: usize = 2 << 30;

/// How [`grouped_linear`](crate::grouped_linear) multiplies on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupedGemmChoice {
    /// Chosen by what was measured: [`Together`](Self::Together) for many small matrices with few
    /// rows, [`Each`](Self::Each) otherwise.
    #[default]
    Auto,
    /// All in one launch of a CubeCL kernel, for bf16 and f16 on Hopper with features a multiple of
    /// 8; falls back to `Each` otherwise. Matrices from a source
    /// ([`MainGrad::with_source`](megaburn_autograd::MainGrad::with_source)) are all held in memory
    /// until the launch.
    Together,
    /// One by one through cuBLASLt.
    Each,
}

impl fmt::Display for GroupedGemmChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Together => "together",
            Self::Each => "each",
        })
    }
}

impl GroupedGemmChoice {
    /// Whether `count` matrices of these dimensions go together, if their rows allow it.
    pub(super) fn take(self, [inputs, outputs]: [usize; 2], count: usize) -> bool {
        match self {
            Self::Auto => count > 1 && inputs * outputs <= MOST_ELEMENTS,
            Self::Together => true,
            Self::Each => false,
        }
    }

    /// Whether these numbers of rows allow it.
    #[cfg(feature = "cuda")]
    pub(super) fn take_rows(
        self,
        [inputs, outputs]: [usize; 2],
        row_ranges: &[Range<usize>],
    ) -> bool {
        let rows: usize = row_ranges.iter().map(Range::len).sum();
        let is_few = || rows * inputs * outputs <= MOST_TERMS * row_ranges.len();
        rows > 0 && (self != Self::Auto || is_few())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_small_matrices_go_together() {
        assert!(GroupedGemmChoice::Auto.take([2048, 1536], 128));
        assert!(!GroupedGemmChoice::Auto.take([2048, 1536], 1));
        assert!(!GroupedGemmChoice::Auto.take([4096, 28_672], 8));
    }
}

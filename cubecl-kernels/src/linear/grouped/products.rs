//! The products of each matrix with its range of rows, joined.
//!
//! On CUDA, many small matrices are multiplied by one kernel. For others each product is written
//! directly to its place in the result, if memory can be sliced there (alignment). Elsewhere the
//! products are concatenated. Every matrix is read exactly once, by any of these paths, because
//! reading may be a collective.

use std::ops::Range;

use burn::tensor::Tensor;
use megaburn_autograd::LinearPass;

use super::choice::GroupedGemmChoice;
use super::options::GroupWeight;
use super::rows::part;
use crate::gemm_ops::GemmAlgorithm;
use crate::linear::{LinearOptions, linear};

/// Multiplies each range by its matrix or, in backward, by its transpose. All matrices are read,
/// also those of empty ranges.
pub(super) fn products(
    x: &Tensor<2>,
    row_ranges: &[Range<usize>],
    weights: &[GroupWeight],
    pass: LinearPass,
    choice: GroupedGemmChoice,
) -> Tensor<2> {
    #[cfg(not(feature = "cuda"))]
    let _ = choice;
    #[cfg(feature = "cuda")]
    if let Some(joined) = super::launch::products::products(x, row_ranges, weights, pass, choice) {
        if pass == LinearPass::Forward {
            // The host has just waited for the row counts and the GPU for the host, so submit at
            // once.
            crate::gpu::flush(x);
        }
        return joined;
    }
    let parts = row_ranges
        .iter()
        .zip(weights)
        .map(|(slice_of, w)| product(part(x, slice_of), w, pass));
    let parts: Vec<_> = parts.collect();
    let (some, mut none): (Vec<_>, Vec<_>) = parts.into_iter().partition(|y| y.dims()[0] > 0);
    if some.is_empty() {
        none.swap_remove(0)
    } else {
        Tensor::cat(some, 0)
    }
}

fn product(x: Tensor<2>, group: &GroupWeight, pass: LinearPass) -> Tensor<2> {
    let options = LinearOptions {
        out_in: pass == LinearPass::Backward,
        main_grad: group.main_grad.clone(),
        algorithm: GemmAlgorithm::Deterministic,
        ..Default::default()
    };
    let product = || linear(x, group.weight.clone(), None, options);
    match pass {
        LinearPass::Forward => product(),
        LinearPass::Backward => LinearPass::backward(product),
    }
}

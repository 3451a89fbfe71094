//! The products of each matrix with its range of rows, joined.
//!
//! On CUDA, many small matrices are multiplied by one kernel. For others each product is written
//! directly to its place in the result, if memory can be sliced there (alignment). Elsewhere the
//! products are concatenated. Every matrix is read exactly once, by any of these paths, because
//! reading may be a collective.

use std::ops::Range;

use burn::tensor::Tensor;
use megaburn_autograd::LinearPass;

use super::{GroupWeight, GroupedGemmChoice, LinearOptions, linear};
use crate::gemm_ops::GemmAlgorithm;

/// The rows of one range.
pub(super) fn part(x: &Tensor<2>, slice_of: &Range<usize>) -> Tensor<2> {
    match slice_of.is_empty() {
        // Backends may reject an empty slice.
        true => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
        false => x.clone().narrow(0, slice_of.start, slice_of.len()),
    }
}

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
    if let Some(joined) = cube::products(x, row_ranges, weights, pass, choice) {
        if pass == LinearPass::Forward {
            // The host has just waited for the row counts and the GPU for the host, so submit at
            // once.
            crate::flush(x);
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

#[cfg(feature = "cuda")]
mod cube {
    use burn_cubecl::tensor::CubeTensor;
    use megaburn_cuda::gemm::{self, ProductIntoOptions, ProductOptions};
    use megaburn_cuda::{CudaQueue, tensor};

    use super::*;
    use crate::grouped_gemm;
    use crate::kernel_parts::{on_gpu, wrap};

    pub(super) fn products(
        x: &Tensor<2>,
        row_ranges: &[Range<usize>],
        weights: &[GroupWeight],
        pass: LinearPass,
        choice: GroupedGemmChoice,
    ) -> Option<Tensor<2>> {
        let [num_rows, _] = x.dims();
        let dtype = x.dtype();
        let [inputs, outputs] = weights[0].weight.dims();
        let columns = if pass == LinearPass::Forward {
            outputs
        } else {
            inputs
        };
        let like = on_gpu(x)?;
        let can = num_rows * columns > 0
            && CudaQueue::of(&like).is_some()
            && gemm::takes(dtype, dtype, dtype)
            && weights.iter().all(|group| group.weight.dtype() == dtype);
        if !can {
            return None;
        }
        let read = |group: &GroupWeight| {
            let weight = match pass {
                LinearPass::Forward => read(group),
                LinearPass::Backward => LinearPass::backward(|| read(group)).transpose(),
            };
            on_gpu(&weight).expect("matrices and rows are on the same device")
        };
        let are_together = choice.take([inputs, outputs], weights.len())
            && choice.take_rows([inputs, outputs], row_ranges)
            && grouped_gemm::runs_on(&like);
        let matrices = are_together.then(|| weights.iter().map(read).collect::<Vec<_>>());
        if let Some(matrices) = &matrices
            && let Some(y) = grouped_gemm::rows_times_matrices(like.clone(), row_ranges, matrices)
        {
            return Some(wrap(y));
        }
        let whole = tensor::empty(&like, [num_rows * columns], dtype);
        let room = |slice_of: &Range<usize>| {
            if slice_of.is_empty() {
                Some(None)
            } else {
                let start = slice_of.start * columns;
                let shape = [slice_of.len(), columns];
                Some(Some(tensor::slice_of(&whole, start, shape)?))
            }
        };
        let rooms: Option<Vec<_>> = row_ranges.iter().map(room).collect();
        let Some(rooms) = rooms else {
            return matrices.map(|matrices| separately(x, row_ranges, matrices));
        };
        for (i, (slice_of, room)) in row_ranges.iter().zip(rooms).enumerate() {
            let weight = match &matrices {
                Some(matrices) => matrices[i].clone(),
                None => read(&weights[i]),
            };
            let Some(room) = room else { continue };
            let x = on_gpu(&part(x, slice_of)).expect("a slice is on its tensor's device");
            let done = gemm::product_into(
                x,
                weight,
                &room,
                ProductIntoOptions {
                    add: false,
                    tune: false,
                },
            );
            launched(done);
        }
        Some(wrap::<1>(whole).reshape([num_rows, columns]))
    }

    /// Unwraps a launch. Shapes and dtypes were checked before; a failure on the device surfaces at
    /// the next read.
    #[expect(
        clippy::panic,
        reason = "an operation on tensors cannot return an error"
    )]
    fn launched<T>(result: Result<T, megaburn_cuda::CudaError>) -> T {
        result.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Multiplies by matrices that were already read, and concatenates the products. At least one
    /// range is not empty.
    fn separately(
        x: &Tensor<2>,
        row_ranges: &[Range<usize>],
        matrices: Vec<CubeTensor>,
    ) -> Tensor<2> {
        let some = row_ranges
            .iter()
            .zip(matrices)
            .filter(|(slice_of, _)| !slice_of.is_empty());
        let parts = some.map(|(slice_of, matrix)| {
            let x = on_gpu(&part(x, slice_of)).expect("a slice is on its tensor's device");
            let options = ProductOptions {
                scale: 1.0,
                dtype: x.dtype,
                tune: false,
            };
            let done = gemm::product(x, matrix, None, options);
            wrap(launched(done))
        });
        Tensor::cat(parts.collect(), 0)
    }

    /// Reads the matrix as [`linear`] does.
    fn read(group: &GroupWeight) -> Tensor<2> {
        let kept = group.main_grad.as_ref().and_then(|main_grad| {
            main_grad.check("grouped_linear", group.weight.dims());
            main_grad.notify_use();
            main_grad.weight(LinearPass::Forward)
        });
        kept.unwrap_or_else(|| group.weight.clone())
    }
}

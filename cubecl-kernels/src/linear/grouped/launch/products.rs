//! The products on GPUs: by the kernel of many matrices, or one after the other through cuBLASLt,
//! directly to their places.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use megaburn_autograd::LinearPass;
use megaburn_cuda::gemm::{self, ProductIntoOptions, ProductOptions};
use megaburn_cuda::{CudaQueue, tensor};

use super::{rows_times_matrices, runs_on};
use crate::kernel_parts::{on_gpu, wrap};
use crate::linear::grouped::choice::GroupedGemmChoice;
use crate::linear::grouped::options::GroupWeight;
use crate::linear::grouped::rows::part;

/// See [`products`](crate::linear::grouped::products::products). `None`, with no matrix read, if
/// the GPU's GEMMs do not support the tensors.
pub(in crate::linear::grouped) fn products(
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
        && runs_on(&like);
    let matrices = are_together.then(|| weights.iter().map(read).collect::<Vec<_>>());
    if let Some(matrices) = &matrices
        && let Some(y) = rows_times_matrices(like.clone(), row_ranges, matrices)
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
fn separately(x: &Tensor<2>, row_ranges: &[Range<usize>], matrices: Vec<CubeTensor>) -> Tensor<2> {
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

/// Reads the matrix as [`linear`](crate::linear) does.
fn read(group: &GroupWeight) -> Tensor<2> {
    let kept = group.main_grad.as_ref().and_then(|main_grad| {
        main_grad.check("grouped_linear", group.weight.dims());
        main_grad.notify_use();
        main_grad.weight(LinearPass::Forward)
    });
    kept.unwrap_or_else(|| group.weight.clone())
}

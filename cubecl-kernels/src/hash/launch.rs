use std::ops::Range;

use burn::backend::{Cube, cubecl::dtype_to_storage_type};
use burn::tensor::{DType, Int, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::Runs;
use super::kernels::{PLANES, hash_kernel};
use crate::kernel_parts::{address_type, on_gpu};

/// The most cubes of a launch; every multiprocessor of a large GPU gets several.
const CUBES: usize = 1024;
/// The elements for which a launch has a cube.
const PER_CUBE: usize = 4096;

/// Pairs of partial sums of the elements `indices` of `runs`; see [`PendingHash`](super::PendingHash).
pub(super) fn hash(
    x: Tensor<1>,
    offset: usize,
    runs: Runs,
    indices: Range<usize>,
) -> Tensor<1, Int> {
    let x = tensor::contiguous(on_gpu(&x).expect("the tensor is on a GPU"));
    let cubes = indices.len().div_ceil(PER_CUBE).min(CUBES);
    let sums = tensor::empty(&x, [2 * cubes], DType::I32);
    let dtype = dtype_to_storage_type(x.dtype);
    // A part of a large tensor has large positions, and each unit counts beyond its last element.
    let most = runs.position(indices.end - 1) + CUBES * 32 * PLANES as usize;
    let width = match u32::try_from(most) {
        Ok(_) => address_type(&[&x]),
        Err(_) => AddressType::U64,
    };
    hash_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(cubes as u32, 1, 1),
        CubeDim::new_2d(32, PLANES),
        width,
        x.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        indices.start,
        indices.len(),
        runs.start,
        runs.len,
        runs.stride,
        offset,
        indices.end <= runs.len,
        dtype,
    );
    Tensor::from_primitive::<Cube>(tensor::into_backend(sums))
}

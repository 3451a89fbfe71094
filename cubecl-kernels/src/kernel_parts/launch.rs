use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::parts_kernel;
use super::rows::address_type;

/// Sums f32 partial sums `[parts, n]` to `[n]`, in the dtype paired with each, by one kernel and in
/// a fixed order. Without parts the sums are 0.
pub(crate) fn sum_parts<const K: usize>(
    sums: [(CubeTensor, DType); K],
    parts: u32,
) -> [CubeTensor; K] {
    let n = sums[0].0.meta.shape()[1];
    let totals = sums
        .each_ref()
        .map(|(sum, dtype)| tensor::empty(sum, [n], *dtype));
    let mut places = totals.iter().cloned();
    put_parts(
        sums.map(|(sum, _)| (sum, places.next().expect("there is one total per sum"))),
        parts,
        false,
    );
    totals
}

/// Like [`sum_parts`], but writes each sum to the `n` elements of the tensor paired with it or, if
/// `add`, adds it to them.
pub(crate) fn put_parts<const K: usize>(
    sums: [(CubeTensor, CubeTensor); K],
    parts: u32,
    add: bool,
) {
    let n = sums[0].0.meta.shape()[1];
    let first = &sums[0];
    let second = sums.get(1).unwrap_or(&sums[0]);
    if n > 0 {
        parts_kernel::launch(
            &first.0.client,
            CubeCount::Static(n.div_ceil(32) as u32, 1, 1),
            CubeDim::new_2d(32, 16),
            address_type(&[&first.0]),
            first.0.clone().into_buffer_arg(),
            second.0.clone().into_buffer_arg(),
            first.1.clone().into_buffer_arg(),
            second.1.clone().into_buffer_arg(),
            parts,
            n as u32,
            K == 2,
            add,
            [first.1.dtype, second.1.dtype].map(dtype_to_storage_type),
        );
    }
}

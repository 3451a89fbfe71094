//! [`merge`](crate::attention::partial::merge) on GPUs.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use crate::attention::partial::kernels::{add_rows_kernel, merge_lse_kernel};
use crate::attention::partial::partial_attention::PartialAttention;
use crate::kernel_parts::{on_gpu, wrap};

/// Units of a cube.
const UNITS: usize = 256;

/// Whether these kernels support the tensors: sums in f32, and rows that the lanes of a plane hold
/// in vectors of eight.
pub(in crate::attention::partial) fn takes(
    merged: &PartialAttention,
    part: &PartialAttention,
) -> bool {
    let [.., d_v] = part.out.dims();
    let dtypes = [merged.out.dtype(), merged.lse.dtype(), part.lse.dtype()];
    on_gpu(&merged.out).is_some()
        && dtypes == [DType::F32; 3]
        && d_v.is_multiple_of(8)
        && (8..=256).contains(&d_v)
}

fn contiguous<const D: usize>(x: Tensor<D>) -> CubeTensor {
    tensor::contiguous(on_gpu(&x).expect("the part is on the sum's device"))
}

/// The tensor's memory for writing, with contiguous rows; a copy if the tensor has other owners.
fn own<const D: usize>(x: Tensor<D>) -> CubeTensor {
    // `x` is consumed, since `can_mut` holds only for the last reference.
    let inner = x
        .try_into_primitive::<burn::backend::Cube>()
        .expect("the tensor is on a GPU");
    let inner = tensor::from_backend(inner);
    // Burn pads the rows of a copy.
    tensor::contiguous(if inner.can_mut() { inner } else { inner.copy() })
}

pub(in crate::attention::partial) fn merge_lse(
    merged: PartialAttention,
    start: usize,
    part: PartialAttention,
) -> PartialAttention {
    let [s_q, b, hq, d_v] = merged.out.dims();
    let [n, ..] = part.out.dims();
    let out = own(merged.out);
    let lse = own(merged.lse);
    let of_part = contiguous(part.out);
    let lse_of_part = contiguous(part.lse);
    let rows = n * b * hq;
    let chunks = d_v / 8;
    let cubes = (rows * chunks.next_power_of_two()).div_ceil(UNITS) as u32;
    merge_lse_kernel::launch(
        &out.client.clone(),
        CubeCount::Static(cubes, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        out.clone().into_buffer_arg(),
        lse.clone().into_buffer_arg(),
        of_part.clone().into_buffer_arg(),
        lse_of_part.into_buffer_arg(),
        rows as u32,
        n as u32,
        start as u32,
        s_q as u32,
        chunks,
        dtype_to_storage_type(of_part.dtype),
    );
    PartialAttention {
        out: wrap(out),
        lse: wrap(lse),
    }
}

pub(in crate::attention::partial) fn add_rows(
    sum: Tensor<4>,
    start: usize,
    x: Tensor<4>,
) -> Tensor<4> {
    let [n, b, h, d] = x.dims();
    let sum = own(sum);
    let x = contiguous(x);
    let row = b * h * d;
    let lanes = [4, 1]
        .into_iter()
        .find(|lanes| row.is_multiple_of(*lanes))
        .unwrap_or(1);
    let vectors = n * row / lanes;
    add_rows_kernel::launch(
        &sum.client.clone(),
        CubeCount::Static(vectors.div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        lanes,
        sum.clone().into_buffer_arg(),
        x.clone().into_buffer_arg(),
        start * row / lanes,
        vectors,
        [sum.dtype, x.dtype].map(dtype_to_storage_type),
    );
    wrap(sum)
}

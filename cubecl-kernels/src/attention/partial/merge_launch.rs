//! The sums of [`online_softmax`](super::online_softmax) on GPUs, each in one pass over memory.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::PartialAttention;
use super::merge::LOWEST;
use crate::kernel_parts::{on_gpu, wrap};

/// Units of a cube.
const UNITS: usize = 256;

/// Whether these kernels support the tensors: sums in f32, and rows that the lanes of a plane hold
/// in vectors of eight.
pub(super) fn takes(joined: &PartialAttention, part: &PartialAttention) -> bool {
    let [.., d_v] = part.out.dims();
    let dtypes = [joined.out.dtype(), joined.lse.dtype(), part.lse.dtype()];
    on_gpu(&joined.out).is_some()
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

pub(super) fn join(
    joined: PartialAttention,
    start: usize,
    part: PartialAttention,
) -> PartialAttention {
    let [s_q, b, hq, d_v] = joined.out.dims();
    let [n, ..] = part.out.dims();
    let out = own(joined.out);
    let lse = own(joined.lse);
    let of_part = contiguous(part.out);
    let lse_of_part = contiguous(part.lse);
    let rows = n * b * hq;
    let chunks = d_v / 8;
    let cubes = (rows * chunks.next_power_of_two()).div_ceil(UNITS) as u32;
    join_kernel::launch(
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

pub(super) fn add_rows(sum: Tensor<4>, start: usize, x: Tensor<4>) -> Tensor<4> {
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

/// Merges a part with the queries from `start` on; a unit has a chunk of eight elements.
///
/// # Shapes
/// `out: [s_q * per_position, d_v / 8]` vectors of eight, and `lse: [per_position, s_q]`, where
/// `per_position = rows / n` counts the heads of all sequences; `part` and `part_lse` are the same
/// for `n` positions
#[cube(launch)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per buffer and per size"
)]
fn join_kernel<F: Float>(
    out: &mut [Vector<f32, Const<8>>],
    lse: &mut [f32],
    part: &[Vector<F, Const<8>>],
    part_lse: &[f32],
    rows: u32,
    n: u32,
    start: u32,
    s_q: u32,
    #[comptime] chunks: usize,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(chunks.next_power_of_two() as u32);
    let row = (CUBE_POS_X * CUBE_DIM + UNIT_POS) / lanes;
    let chunk = UNIT_POS % lanes;
    // A row is `(position * sequences + sequence) * heads + head`.
    let per_position = rows / n;
    let position = row / per_position;
    let rest = row % per_position;
    let at = (rest * s_q + start + position) as usize;
    let mut mine = f32::new(LOWEST as f32);
    let mut theirs = f32::new(LOWEST as f32);
    // Only the lane that writes the LSE reads it; the others get it by shuffle.
    if row < rows && chunk == 0 {
        mine = lse[at];
        theirs = part_lse[(rest * n + position) as usize];
    }
    let first = UNIT_POS % 32 - chunk;
    mine = plane_shuffle(mine, first);
    theirs = plane_shuffle(theirs, first);
    let highest = max(max(mine, theirs), f32::new(LOWEST as f32));
    let mine = (mine - highest).exp();
    let theirs = (theirs - highest).exp();
    let sum = mine + theirs;
    // If neither part sees a key, this avoids 0 / 0.
    let over = max(sum, f32::new(f32::MIN_POSITIVE));
    if row < rows && chunk < comptime!(chunks as u32) {
        let from = row as usize * chunks + chunk as usize;
        let to = from + (start * per_position) as usize * chunks;
        let theirs = Vector::<f32, Const<8>>::cast_from(part[from]) * Vector::new(theirs / over);
        out[to] = out[to] * Vector::new(mine / over) + theirs;
        if chunk == 0 {
            lse[at] = sum.ln() + highest;
        }
    }
}

/// Adds `vectors` vectors of `x` to those of `sum` from `first` on.
#[cube(launch)]
fn add_rows_kernel<F: Float, G: Float, N: Size>(
    sum: &mut [Vector<F, N>],
    x: &[Vector<G, N>],
    first: usize,
    vectors: usize,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let to = first + ABSOLUTE_POS;
        sum[to] += Vector::cast_from(x[ABSOLUTE_POS]);
    }
}

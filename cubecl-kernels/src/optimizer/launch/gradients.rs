//! Kernels for scaling, partial sums of squares and their total.

use burn::backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::addresses::{Access, table};
use megaburn_cuda::tensor;

use super::many::{QUAD, Quad, entries, is_in_quads, planes, quad_at};
use super::{UNITS, cubes, lanes, on_gpu, units, wrap};

/// The number of cubes of a sum; every multiprocessor of a large GPU gets several.
const SUMS: usize = 1024;

pub(in crate::optimizer) fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    let x = on_gpu(x);
    let factor = on_gpu(factor);
    let len = x.meta.num_elements();
    let lanes = lanes(len, &[x.dtype]);
    let client = x.client.clone();
    let dtype = dtype_to_storage_type(x.dtype);
    let (out, out_arg) = if x.can_mut() {
        (x.clone(), x.as_tensor_alias(0))
    } else {
        let out = tensor::empty(&x, x.shape(), x.dtype);
        (out.clone(), out.into_tensor_arg())
    };
    scale_kernel::launch(
        &client,
        cubes(len / lanes),
        units(),
        lanes,
        x.into_buffer_arg(),
        factor.into_buffer_arg(),
        out_arg.into_buffer_arg(),
        len / lanes,
        dtype,
    );
    wrap(out)
}

pub(in crate::optimizer) fn total(sums: Tensor<1>) -> Tensor<1> {
    let sums = on_gpu(sums);
    let out = tensor::empty(&sums, [1], DType::F32);
    let len = sums.meta.num_elements();
    total_kernel::launch(
        &sums.client.clone(),
        CubeCount::Static(1, 1, 1),
        units(),
        sums.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        len as u64,
    );
    wrap(out)
}

/// Sums the tensors that the multi-tensor kernel supports in one launch, and the others one by one.
pub(in crate::optimizer) fn sums_of_squares(tensors: Vec<Tensor<1>>) -> Tensor<1> {
    let tensors = tensors.into_iter().map(on_gpu);
    let (many, others): (Vec<_>, Vec<_>) = tensors.partition(is_in_quads);
    let (many, others) = match many.len() {
        0 | 1 => (Vec::new(), [many, others].concat()),
        _ => (many, others),
    };
    let together = (!many.is_empty()).then(|| sums_of_many(&many));
    let sums = together
        .into_iter()
        .chain(others.into_iter().map(sums_of_one));
    Tensor::cat(sums.map(wrap).collect(), 0)
}

fn sums_of_one(x: CubeTensor) -> CubeTensor {
    let len = x.meta.num_elements();
    let dtype = dtype_to_storage_type(x.dtype);
    let lanes = lanes(len, &[x.dtype]);
    let sums = tensor::empty(&x, [SUMS], DType::F32);
    squares_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(SUMS as u32, 1, 1),
        planes(),
        lanes,
        x.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        (len / lanes) as u64,
        dtype,
    );
    sums
}

/// Partial sums of squares of tensors that are [in quads](is_in_quads), in one launch.
fn sums_of_many(tensors: &[CubeTensor]) -> CubeTensor {
    let entries = entries(tensors.iter().map(|x| x.meta.num_elements()), [QUAD]);
    let cubes = entries.len() / 2;
    let sums = tensor::empty(&tensors[0], [cubes], DType::F32);
    let table = table(tensors, Access::Read, entries);
    // SAFETY: the tensors are held until this returns, and have the number of quads that the table
    // states, from the stated addresses. Each cube writes one sum.
    unsafe {
        squares_of_many_kernel::launch_unchecked(
            &sums.client.clone(),
            CubeCount::Static(cubes as u32, 1, 1),
            planes(),
            table.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
        );
    }
    sums
}

#[cube(launch)]
fn scale_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    factor: &[f32],
    out: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let wide = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        out[ABSOLUTE_POS] = Vector::cast_from(wide * Vector::new(factor[0]));
    }
}

/// Partial sums of squares: cube `i` sums every `SUMS`-th block of `UNITS` vectors, from the `i`th
/// on.
#[cube(launch)]
fn squares_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    sums: &mut [f32],
    vectors: u64,
    #[define(F)] _dtype: ElemType,
) {
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut at = ABSOLUTE_POS;
    let step = CUBE_COUNT * UNITS;
    while at < vectors as usize {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += value * value;
        at += step;
    }
    put_sum(Vector::vector_sum(sum), sums);
}

/// `table` has for each cube the address of its first quad, and the number of quads.
#[cube(launch_unchecked)]
fn squares_of_many_kernel(table: &[u64], sums: &mut [f32]) {
    let entry = CUBE_POS * 2;
    let from = table[entry];
    let quads = table[entry + 1] as usize;
    let mut sum = Quad::new(0.0);
    let mut at = UNIT_POS as usize;
    while at < quads {
        let value = quad_at(from + at as u64 * QUAD);
        sum += value * value;
        at += UNITS;
    }
    put_sum(Vector::vector_sum(sum), sums);
}

/// Adds the sums of a cube's units and writes the result at the cube's index.
#[cube]
fn put_sum(sum: f32, sums: &mut [f32]) {
    let mut shared = Shared::new_slice(8usize);
    let sum = plane_sum(sum);
    if UNIT_POS_X == 0 {
        shared[UNIT_POS_Y as usize] = sum;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f32::new(0.0);
        #[unroll]
        for i in 0..8 {
            total += shared[i];
        }
        sums[CUBE_POS] = total;
    }
}

/// Adds partial sums with one cube: each unit sums every 256th, and the first unit adds the units'
/// sums. Elements past the first `len` are padding of the allocation, or belong to another tensor.
#[cube(launch)]
fn total_kernel(sums: &[f32], out: &mut [f32], len: u64) {
    let mut shared = Shared::<[f64]>::new_slice(UNITS);
    let mut sum = f64::new(0.0);
    let mut at = UNIT_POS as usize;
    while at < len as usize {
        sum += f64::cast_from(sums[at]);
        at += UNITS;
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f64::new(0.0);
        for i in 0..UNITS {
            total += shared[i];
        }
        out[0] = f32::cast_from(total);
    }
}

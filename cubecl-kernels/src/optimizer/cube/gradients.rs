//! A factor, sums of squares, and the sum of those.

use burn::backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::{UNITS, cubes, lanes, on_gpu, units, wrap};

/// Cubes of a sum: as many as give every multiprocessor of a large GPU several.
const SUMS: usize = 1024;

pub(in crate::optimizer) fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    let (x, factor) = (on_gpu(x), on_gpu(factor));
    let len = x.meta.num_elements();
    let lanes = lanes(len, &[x.dtype]);
    let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
    let (out, out_arg) = match x.can_mut() {
        true => (x.clone(), x.as_tensor_alias(0)),
        false => {
            let out = tensor::empty(&x, x.shape(), x.dtype);
            (out.clone(), out.into_tensor_arg())
        }
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
    let (out, len) = (tensor::empty(&sums, [1], DType::F32), sums.meta.num_elements());
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

pub(in crate::optimizer) fn sums_of_squares(x: Tensor<1>) -> Tensor<1> {
    let x = on_gpu(x);
    let (len, dtype) = (x.meta.num_elements(), dtype_to_storage_type(x.dtype));
    let lanes = lanes(len, &[x.dtype]);
    let sums = tensor::empty(&x, [SUMS], DType::F32);
    squares_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(SUMS as u32, 1, 1),
        CubeDim::new_2d(32, UNITS as u32 / 32),
        lanes,
        x.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        (len / lanes) as u64,
        dtype,
    );
    wrap(sums)
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

/// Each cube sums every `SUMS`-th stretch of as many vectors as it has units.
#[cube(launch)]
fn squares_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    sums: &mut [f32],
    vectors: u64,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::new_slice(8usize);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut at = ABSOLUTE_POS;
    let step = CUBE_COUNT * UNITS;
    while at < vectors as usize {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += value * value;
        at += step;
    }
    let sum = plane_sum(Vector::vector_sum(sum));
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

/// One cube: each unit sums every 256th, the first adds the units' sums. What lies behind the first
/// `len` is the allocation's padding, or another tensor's.
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

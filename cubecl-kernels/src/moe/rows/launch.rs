//! The kernels; each unit computes a vector of at most 16 bytes of a result row.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{Int, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use crate::kernel_parts::{RowView, address_type, lanes};
use crate::moe::tensors::{UNITS, floats, ints, wrap};

/// Terms that a unit loads at once.
const AHEAD: usize = 4;

pub(super) fn permute(x: Tensor<2>, index: Tensor<1, Int>) -> Tensor<2> {
    let x = floats(x);
    let index = ints(index);
    let [num_rows, n] = x.shape().dims();
    let x = RowView::of(x);
    let out = tensor::empty(&x.tensor, [index.meta.num_elements(), n], x.tensor.dtype);
    let lanes = lanes(out.dtype, &[n, x.stride]);
    let vectors = out.meta.num_elements() / lanes;
    let dtypes = [out.dtype, index.dtype].map(dtype_to_storage_type);
    take_kernel::launch(
        &out.client.clone(),
        CubeCount::Static(vectors.div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&x.tensor, &out]),
        lanes,
        x.tensor.into_buffer_arg(),
        index.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        num_rows as i32,
        (n / lanes) as u32,
        (x.stride / lanes) as u32,
        vectors,
        dtypes,
    );
    wrap(out)
}

pub(super) fn unpermute(y: Tensor<2>, index: Tensor<2, Int>) -> Tensor<2> {
    let y = floats(y);
    let index = ints(index);
    let [num_rows, n] = y.shape().dims();
    let [t, k] = index.shape().dims();
    let y = RowView::of(y);
    let out = tensor::empty(&y.tensor, [t, n], y.tensor.dtype);
    let lanes = lanes(out.dtype, &[n, y.stride]);
    let vectors = out.meta.num_elements() / lanes;
    let dtypes = [out.dtype, index.dtype].map(dtype_to_storage_type);
    sum_kernel::launch(
        &out.client.clone(),
        CubeCount::Static(vectors.div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&y.tensor, &out]),
        lanes,
        y.tensor.into_buffer_arg(),
        index.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        num_rows as i32,
        k as u32,
        (n / lanes) as u32,
        (y.stride / lanes) as u32,
        vectors,
        dtypes,
    );
    wrap(out)
}

#[cube(launch, address_type = "dynamic")]
fn take_kernel<F: Float, I: Numeric, N: Size>(
    x: &[Vector<F, N>],
    index: &[I],
    out: &mut [Vector<F, N>],
    num_rows: i32,
    width: u32,
    stride: u32,
    vectors: usize,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let row = i32::cast_from(index[ABSOLUTE_POS / width as usize]);
        let column = ABSOLUTE_POS % width as usize;
        // NaN makes an invalid row index visible.
        let mut value = Vector::<F, N>::new(F::cast_from(f32::NAN));
        if row >= 0 && row < num_rows {
            value = x[usize::cast_from(row) * stride as usize + column];
        }
        out[ABSOLUTE_POS] = value;
    }
}

#[cube(launch, address_type = "dynamic")]
#[expect(
    clippy::too_many_arguments,
    reason = "the rows of two tensors, and how many are summed"
)]
fn sum_kernel<F: Float, I: Numeric, N: Size>(
    y: &[Vector<F, N>],
    index: &[I],
    out: &mut [Vector<F, N>],
    num_rows: i32,
    terms: u32,
    width: u32,
    stride: u32,
    vectors: usize,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let start = ABSOLUTE_POS / width as usize * terms as usize;
        let column = ABSOLUTE_POS % width as usize;
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut first = 0u32;
        while first < terms {
            // Issue the loads of several terms together to hide memory latency.
            let mut read = Array::<Vector<F, N>>::new(AHEAD);
            #[unroll]
            for i in 0..AHEAD {
                read[i] = Vector::new(F::cast_from(0.0f32));
                let term = first + comptime!(i as u32);
                if term < terms {
                    let row = i32::cast_from(index[start + term as usize]);
                    if row >= 0 && row < num_rows {
                        read[i] = y[usize::cast_from(row) * stride as usize + column];
                    } else if row != num_rows {
                        read[i] = Vector::new(F::cast_from(f32::NAN));
                    }
                }
            }
            #[unroll]
            for i in 0..AHEAD {
                sum += Vector::cast_from(read[i]);
            }
            first += comptime!(AHEAD as u32);
        }
        out[ABSOLUTE_POS] = Vector::cast_from(sum);
    }
}

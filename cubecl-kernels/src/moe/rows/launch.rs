//! Launches the kernels of permute and unpermute.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{Int, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{sum_kernel, take_kernel};
use crate::kernel_parts::{RowView, address_type, lanes, wrap};
use crate::moe::launch::{UNITS, floats, ints};

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

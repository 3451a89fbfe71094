//! Lookups and their gradients on CubeCL GPU backends.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::fallback;
use super::kernels::{add_kernel, take_kernel};
use super::op::{Rows, Tokens};

/// Units per cube; also the number of tokens that a cube compares at once.
const UNITS: usize = 256;

impl Rows for Cube {
    fn take_rows(table: FloatTensor<Self>, tokens: Tokens<IntTensor<Self>>) -> FloatTensor<Self> {
        let table = tensor::contiguous(tensor::from_backend(table));
        let ids = tensor::contiguous(tensor::from_backend(tokens.ids));
        let [num_rows, d] = table.shape().dims();
        let n = ids.meta.num_elements();
        let out = tensor::empty(&table, [n, d], table.dtype);
        let lanes = lanes(d);
        let dtypes = [
            dtype_to_storage_type(table.dtype),
            dtype_to_storage_type(ids.dtype),
        ];
        // In an unsharded table every id must have a row: NaN makes a wrong id visible.
        let missing = if tokens.first.is_some() {
            0.0
        } else {
            f32::NAN
        };
        take_kernel::launch(
            &table.client.clone(),
            CubeCount::Static((n * d / lanes).div_ceil(UNITS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            lanes,
            table.into_buffer_arg(),
            ids.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            tokens.first.unwrap_or(0) as i32,
            num_rows as i32,
            (d / lanes) as u32,
            n * d / lanes,
            missing,
            dtypes,
        );
        tensor::into_backend(out)
    }

    fn add_rows(
        dy: FloatTensor<Self>,
        tokens: Tokens<IntTensor<Self>>,
        sum: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if sum.dtype() != DType::F32 {
            return fallback::add_rows::<Self>(dy, tokens, sum);
        }
        let dy = tensor::contiguous(tensor::from_backend(dy));
        let ids = tensor::contiguous(tensor::from_backend(tokens.ids));
        // May be written in place: the result takes over this memory, which can be a slice of a
        // larger buffer.
        let sum = tensor::contiguous(tensor::from_backend(sum));
        let [num_rows, d] = sum.shape().dims();
        let n = ids.meta.num_elements();
        let lanes = lanes(d);
        let dtypes = [
            dtype_to_storage_type(dy.dtype),
            dtype_to_storage_type(ids.dtype),
        ];
        add_kernel::launch(
            &dy.client.clone(),
            CubeCount::Static(n as u32, (d / lanes).div_ceil(UNITS) as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            lanes,
            dy.into_buffer_arg(),
            ids.into_buffer_arg(),
            sum.clone().into_buffer_arg(),
            n as u32,
            tokens.first.unwrap_or(0) as i32,
            num_rows as i32,
            (d / lanes) as u32,
            dtypes,
        );
        tensor::into_backend(sum)
    }
}

/// The widest supported vector width that divides a row.
fn lanes(d: usize) -> usize {
    if d.is_multiple_of(4) { 4 } else { 1 }
}

//! RoPE on CubeCL GPU backends.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::fallback::rotate;
use super::kernels::{Steps, rotate_kernel};
use super::op::{RopeDirection, Rotate};
use super::table::RopeLayout;
use crate::kernel_parts::{address_type, lanes};

const UNITS: usize = 256;

impl Rotate for Cube {
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        turn: RopeDirection,
    ) -> FloatTensor<Self> {
        if x.dtype() == DType::F64 {
            return rotate::<Self>(x, cos, sin, layout, turn);
        }
        let x = tensor::from_backend(x);
        // Queries and keys are views of one GEMM's result: read them in place.
        let is_view = !x.meta.is_tiled() && x.meta.strides()[3] == 1;
        let x = if is_view { x } else { tensor::contiguous(x) };
        let [cos, sin] = [cos, sin].map(|t| tensor::contiguous(tensor::from_backend(t)));
        let y = tensor::empty(&x, x.shape(), x.dtype);
        let [s, b, h, d] = x.meta.shape().dims();
        let [_, each, _, half] = cos.meta.shape().dims();
        let strides = x.meta.strides();
        let by_s = strides[0];
        let by_b = strides[1];
        let by_h = strides[2];
        let lanes = lanes(x.dtype, &[half, d, by_s, by_b, by_h]);
        // Work items per head: pairs of vectors to rotate, and vectors to copy.
        let width = half / lanes;
        let rest = (d - 2 * half) / lanes;
        let items = s * b * h * (width + rest);
        if items == 0 {
            return tensor::into_backend(y);
        }
        let steps = Steps {
            interleaved: layout == RopeLayout::Interleaved,
            back: turn == RopeDirection::Inverse,
            partial: rest > 0,
            each: each > 1,
        };
        let dtypes = [x.dtype, cos.dtype].map(dtype_to_storage_type);
        rotate_kernel::launch(
            &y.client.clone(),
            CubeCount::Static(items.div_ceil(UNITS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(&[&x, &y]),
            lanes,
            x.into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            items,
            b as u32,
            h as u32,
            width as u32,
            rest as u32,
            (by_s / lanes) as u32,
            (by_b / lanes) as u32,
            (by_h / lanes) as u32,
            steps,
            dtypes,
        );
        tensor::into_backend(y)
    }
}

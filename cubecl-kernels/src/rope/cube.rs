//! The rotation on CubeCL's GPUs: a unit turns a vector of the first half of a head and one of the
//! second.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::op::{Rotate, Turn, composed};
use crate::cube::{address_type, lanes};

const UNITS: usize = 256;

impl Rotate for Cube {
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self> {
        if x.dtype() == DType::F64 {
            return composed::<Self>(x, cos, sin, turn);
        }
        let x = tensor::from_backend(x);
        // Queries and keys are views of what one product gave: read where they are.
        let is_view = !x.meta.is_tiled() && x.meta.strides()[3] == 1;
        let x = if is_view { x } else { tensor::contiguous(x) };
        let [cos, sin] = [cos, sin].map(|t| tensor::contiguous(tensor::from_backend(t)));
        let y = tensor::empty(&x, x.shape(), x.dtype);
        let [_, b, h, d] = x.meta.shape().dims();
        let strides = x.meta.strides();
        let (by_s, by_b, by_h) = (strides[0], strides[1], strides[2]);
        let lanes = lanes(x.dtype, &[d / 2, by_s, by_b, by_h]);
        let pairs = y.meta.num_elements() / 2 / lanes;
        if pairs == 0 {
            return tensor::into_backend(y);
        }
        let dtypes = [x.dtype, cos.dtype].map(dtype_to_storage_type);
        rotate_kernel::launch(
            &y.client.clone(),
            CubeCount::Static(pairs.div_ceil(UNITS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(&[&x, &y]),
            lanes,
            x.into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            pairs,
            b as u32,
            h as u32,
            (d / 2 / lanes) as u32,
            (by_s / lanes) as u32,
            (by_b / lanes) as u32,
            (by_h / lanes) as u32,
            turn == Turn::Back,
            dtypes,
        );
        tensor::into_backend(y)
    }
}

/// `width` vectors are half a head; strides are in vectors.
#[cube(launch, address_type = "dynamic")]
fn rotate_kernel<F: Float, T: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[Vector<T, N>],
    sin: &[Vector<T, N>],
    y: &mut [Vector<F, N>],
    pairs: usize,
    batch: u32,
    heads: u32,
    width: u32,
    by_s: u32,
    by_b: u32,
    by_h: u32,
    #[comptime] back: bool,
    #[define(F, T)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < pairs {
        let width = width as usize;
        let column = ABSOLUTE_POS % width;
        let head = ABSOLUTE_POS / width;
        let row = head / heads as usize;
        let position = row / batch as usize;
        let from = position * by_s as usize
            + row % batch as usize * by_b as usize
            + head % heads as usize * by_h as usize
            + column;
        let first = Vector::<f32, N>::cast_from(x[from]);
        let second = Vector::<f32, N>::cast_from(x[from + width]);
        let cos = Vector::<f32, N>::cast_from(cos[position * width + column]);
        let mut sin = Vector::<f32, N>::cast_from(sin[position * width + column]);
        if comptime!(back) {
            sin = -sin;
        }
        let to = head * 2 * width + column;
        y[to] = Vector::cast_from(first * cos - second * sin);
        y[to + width] = Vector::cast_from(second * cos + first * sin);
    }
}

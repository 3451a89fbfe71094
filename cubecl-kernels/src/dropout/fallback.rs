//! Fallback for dropout, composed of a backend's primitives: multiplies by a mask from the host.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, TensorData};
use megaburn_autograd::backend_ops::{cast, compute_dtype, row, rows, sum_rows};
use megaburn_autograd::on_composed_backends;

use super::op::{Drop, DropoutInput, Mask};

on_composed_backends! {
    impl Drop {
        fn forward(mask: &Mask, input: DropoutInput<FloatTensor<Self>>) -> FloatTensor<Self> {
            forward::<Self>(mask, input)
        }

        fn backward(
            mask: &Mask,
            dy: FloatTensor<Self>,
            bias: Option<DType>,
        ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
            backward::<Self>(mask, dy, bias)
        }
    }
}

pub(super) fn forward<B: Backend>(
    mask: &Mask,
    input: DropoutInput<FloatTensor<B>>,
) -> FloatTensor<B> {
    let DropoutInput { x, bias, residual } = input;
    let shape = x.shape();
    let dtype = x.dtype();
    let wide = compute_dtype(dtype);
    let mut y = cast::<B>(rows::<B>(x), wide);
    if let Some(bias) = bias {
        y = B::float_add(y, row::<B>(bias, wide));
    }
    y = masked::<B>(mask, y, &shape, wide);
    if let Some(residual) = residual {
        y = B::float_add(cast::<B>(rows::<B>(residual), wide), y);
    }
    B::float_reshape(cast::<B>(y, dtype.into()), shape)
}

pub(super) fn backward<B: Backend>(
    mask: &Mask,
    dy: FloatTensor<B>,
    bias: Option<DType>,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let shape = dy.shape();
    let dtype = dy.dtype();
    let wide = compute_dtype(dtype);
    let dx = masked::<B>(mask, cast::<B>(rows::<B>(dy), wide), &shape, wide);
    let dbias = bias.map(|dtype| sum_rows::<B>(dx.clone(), dtype));
    (B::float_reshape(cast::<B>(dx, dtype.into()), shape), dbias)
}

/// Multiplies the rows of a tensor of `shape` by the mask.
fn masked<B: Backend>(
    mask: &Mask,
    rows: FloatTensor<B>,
    shape: &Shape,
    wide: FloatDType,
) -> FloatTensor<B> {
    if mask.p == 0.0 {
        return rows;
    }
    let factors = TensorData::new(mask.key.factors(shape, mask.p), rows.shape());
    let factors = cast::<B>(B::float_from_data(factors, &rows.device()), wide);
    B::float_mul(rows, factors)
}

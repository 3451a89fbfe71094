//! Additions to rows and sums over rows, composed of a backend's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, Tensor};
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::backend_ops::{cast, compute_dtype, last_dim, rows, sum_rows};
use megaburn_autograd::on_composed_backends;

use super::column_sum::ColumnSum;
use super::op::AddToRows;

on_composed_backends! {
    impl ColumnSum {
        fn column_sum(x: FloatTensor<Self>, groups: usize, dtype: DType) -> FloatTensor<Self> {
            column_sum::<Self>(x, groups, dtype)
        }

        fn add_column_sum(x: FloatTensor<Self>, sum: Option<Tensor<2>>) -> Tensor<2> {
            add_column_sum::<Self>(x, sum)
        }
    }
}

/// See [`ColumnSum::column_sum`].
pub(super) fn column_sum<B: Backend>(
    x: FloatTensor<B>,
    groups: usize,
    dtype: DType,
) -> FloatTensor<B> {
    let n = last_dim(&x.shape());
    let wide = compute_dtype(x.dtype());
    let result = Shape::from([groups, n]);
    let x = cast::<B>(rows::<B>(x), wide);
    if groups == 1 {
        return B::float_reshape(sum_rows::<B>(x, dtype), result);
    }
    let each = x.shape()[0] / groups.max(1);
    let sum = B::float_sum_dim(B::float_reshape(x, Shape::from([groups, each, n])), 1);
    cast::<B>(B::float_reshape(sum, result), dtype.into())
}

/// See [`ColumnSum::add_column_sum`].
pub(super) fn add_column_sum<B: IntoPrimitive>(
    x: FloatTensor<B>,
    sum: Option<Tensor<2>>,
) -> Tensor<2> {
    let x = cast::<B>(x, FloatDType::F32);
    let term = B::wrap(column_sum::<B>(x, 1, DType::F32));
    match sum {
        Some(sum) => sum + term,
        None => term,
    }
}

on_composed_backends! {
    impl AddToRows {
        fn add_to_rows(
            x: FloatTensor<Self>,
            addend: FloatTensor<Self>,
            groups: usize,
        ) -> FloatTensor<Self> {
            add_to_rows::<Self>(x, addend, groups)
        }
    }
}

/// See [`AddToRows::add_to_rows`].
pub(super) fn add_to_rows<B: Backend>(
    x: FloatTensor<B>,
    addend: FloatTensor<B>,
    groups: usize,
) -> FloatTensor<B> {
    let shape = x.shape();
    let dtype = x.dtype();
    if shape.num_elements() == 0 {
        return x;
    }
    let n = last_dim(&shape);
    let wide = compute_dtype(dtype);
    let each = shape.num_elements() / (groups * n);
    let x = B::float_reshape(cast::<B>(x, wide), Shape::from([groups, each, n]));
    let addend = B::float_reshape(cast::<B>(addend, wide), Shape::from([groups, 1, n]));
    B::float_reshape(cast::<B>(B::float_add(x, addend), dtype.into()), shape)
}

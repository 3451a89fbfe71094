//! The sum of a column, composed of a backend's primitives.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use megaburn_autograd::backend_ops::{cast, compute_dtype};
use megaburn_autograd::on_composed_backends;

use super::op::SumAll;

on_composed_backends! {
    impl SumAll {
        fn sum_all(column: FloatTensor<Self>) -> FloatTensor<Self> {
            let count = column.shape()[0];
            let dtype = column.dtype();
            let row = cast::<Self>(column, compute_dtype(dtype));
            let row = Self::float_reshape(row, Shape::from([1, count]));
            let sum = Self::float_reshape(Self::float_sum_dim(row, 1), Shape::from([1]));
            cast::<Self>(sum, dtype.into())
        }
    }
}

//! The sum of a column on CubeCL GPU backends, by the kernel of [`ColumnSum`].

use burn::backend::Cube;
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;

use super::op::SumAll;
use crate::bias::ColumnSum;

impl SumAll for Cube {
    fn sum_all(column: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = column.dtype();
        Self::float_reshape(Self::column_sum(column, 1, dtype), Shape::from([1]))
    }
}

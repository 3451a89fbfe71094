//! Sums over rows, composed of a backend's primitives. GPU backends have kernels instead.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, Tensor};
use megaburn_autograd::backend_ops::{cast, compute_dtype, last_dim, rows, sum_rows};
use megaburn_autograd::{IntoPrimitive, MainGrad};

/// Sums over rows, with the best implementation per backend; the gradient of a vector that was
/// added to each row.
pub(crate) trait ColumnSum: IntoPrimitive {
    /// Splits the rows into `groups` ranges of equal length and sums each in f32 (f64 for f64).
    ///
    /// # Shapes
    /// `x: [.., n]` to `[groups, n]` in `dtype`
    fn column_sum(x: FloatTensor<Self>, groups: usize, dtype: DType) -> FloatTensor<Self>;

    /// Adds the sum of all rows to `sum`, in f32. May write `sum` in place.
    ///
    /// # Shapes
    /// `x: [.., n]`; sum and result `[1, n]`
    fn add_column_sum(x: FloatTensor<Self>, sum: Option<Tensor<2>>) -> Tensor<2>;
}

#[cfg(feature = "flex")]
impl ColumnSum for burn::backend::Flex {
    fn column_sum(x: FloatTensor<Self>, groups: usize, dtype: DType) -> FloatTensor<Self> {
        column_sum::<Self>(x, groups, dtype)
    }

    fn add_column_sum(x: FloatTensor<Self>, sum: Option<Tensor<2>>) -> Tensor<2> {
        add_column_sum::<Self>(x, sum)
    }
}

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

/// Computes a bias gradient from the rows that sum to it. If the main gradient is attached, adds to
/// it and returns `None`; otherwise returns the gradient in `dtype`, to be registered.
///
/// # Shapes
/// `rows: [.., n]` to `[n]`
pub(crate) fn bias_gradient<B: ColumnSum>(
    rows: FloatTensor<B>,
    dtype: DType,
    main_grad: Option<&MainGrad>,
) -> Option<FloatTensor<B>> {
    match main_grad.filter(|main_grad| main_grad.is_attached()) {
        Some(main_grad) => {
            main_grad.update(|sum, _| B::add_column_sum(rows, sum));
            None
        }
        None => {
            let n = last_dim(&rows.shape());
            Some(B::float_reshape(
                B::column_sum(rows, 1, dtype),
                Shape::from([n]),
            ))
        }
    }
}

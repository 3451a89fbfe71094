//! Sums over rows, which other operations use too.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape, Tensor};
use megaburn_autograd::backend_ops::last_dim;
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

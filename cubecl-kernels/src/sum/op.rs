//! Sums under automatic differentiation.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;
use megaburn_autograd::{FusedOp, InputGrads};

use crate::bias::ColumnSum;

/// The sum of a column, with the best implementation per backend.
pub(crate) trait SumAll: Backend {
    /// `[count, 1]` to `[1]`.
    fn sum_all(column: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// A sum of all elements, or of the columns.
#[derive(Debug)]
pub(super) enum Sum {
    /// `[..]` to `[1]`.
    All,
    /// `[rows, n]` to `[1, n]`.
    Columns,
}

impl<B: SumAll + ColumnSum> FusedOp<B, 1> for Sum {
    /// The shape of `x`.
    type Saved = Shape;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let shape = x.shape();
        let sum = match self {
            Self::All => {
                let count = shape.num_elements();
                B::sum_all(B::float_reshape(x, Shape::from([count, 1])))
            }
            Self::Columns => {
                let dtype = x.dtype();
                B::column_sum(x, 1, dtype)
            }
        };
        (sum, shape)
    }

    fn backward(shape: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        // The gradient of a sum of all elements is one number, that of the columns a row.
        let dims = shape.num_dims();
        let mut row = vec![1; dims];
        row[dims - 1] = dy.shape().num_elements();
        let dx = B::float_expand(B::float_reshape(dy, Shape::from(row)), shape);
        grads.register(0, dx);
    }
}

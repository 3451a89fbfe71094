//! Adds a vector to each row, under automatic differentiation.
//!
//! The gradient of the rows is the gradient of the result, unchanged; the gradient of the addend is
//! the sum over the rows it was added to. (Burn's own broadcast addition sums with a generic
//! reduction kernel, which takes many times as long on a GPU.)

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use megaburn_autograd::{FusedOp, InputGrads, MainGrad};

use super::column_sum::{ColumnSum, bias_gradient};

/// How an addend is added to rows, apart from its values.
#[derive(Clone, Debug)]
pub(crate) struct Addend {
    /// The number of rows of the addend. The rows of `x` are split into as many equal ranges, one
    /// per row of the addend.
    pub(super) groups: usize,
    /// The main gradient that accumulates the addend's gradient, once attached; for a single row
    /// only.
    pub(super) main_grad: Option<MainGrad>,
}

/// Adds an addend to rows, with the best implementation per backend.
pub(crate) trait AddToRows: ColumnSum {
    /// # Shapes
    /// `x`, result: `[.., n]`; `addend`: `groups * n` elements
    fn add_to_rows(
        x: FloatTensor<Self>,
        addend: FloatTensor<Self>,
        groups: usize,
    ) -> FloatTensor<Self>;
}

#[derive(Clone, Debug)]
pub(crate) struct SavedAddend {
    addend: Addend,
    shape: Shape,
    dtype: DType,
}

/// The inputs are `x: [.., n]` and the values of the addend.
impl<B: AddToRows> FusedOp<B, 2> for Addend {
    type Saved = SavedAddend;

    fn forward(self, [x, values]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, Self::Saved) {
        let saved = SavedAddend {
            shape: values.shape(),
            dtype: values.dtype(),
            addend: self,
        };
        let y = B::add_to_rows(x, values, saved.addend.groups);
        (y, saved)
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let SavedAddend {
            addend: Addend { groups, main_grad },
            shape,
            dtype,
        } = saved;
        if grads.wants(1) {
            let gradient = match groups {
                1 => bias_gradient::<B>(dy.clone(), dtype, main_grad.as_ref()),
                _ => Some(B::column_sum(dy.clone(), groups, dtype)),
            };
            if let Some(gradient) = gradient {
                grads.register(1, B::float_reshape(gradient, shape));
            }
        }
        grads.register(0, dy);
    }
}

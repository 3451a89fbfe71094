//! Repeating a head under automatic differentiation. (The gradient of Burn's own `expand` uses a
//! generic reduction kernel.)

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use megaburn_autograd::{FusedOp, InputGrads};

use crate::bias::ColumnSum;

/// `[s, b, 1, d]` to `[s, b, heads, d]`.
#[derive(Debug)]
pub(super) struct RepeatHeads {
    pub(super) heads: usize,
}

impl<B: ColumnSum> FusedOp<B, 1> for RepeatHeads {
    /// The shape of `x`.
    type Saved = Shape;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let shape = x.shape();
        let [s, b, _, d] = shape.dims();
        (
            B::float_expand(x, Shape::from([s, b, self.heads, d])),
            shape,
        )
    }

    fn backward(shape: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let [s, b, _, _] = shape.dims();
        let dtype = dy.dtype();
        let dx = B::float_reshape(B::column_sum(dy, s * b, dtype), shape);
        grads.register(0, dx);
    }
}

//! Dropout under automatic differentiation. The backward pass regenerates the mask of the forward
//! pass, so no tensor is saved for backward.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use megaburn_autograd::{FusedOp, InputGrads, optional};

use super::{Drop, DropoutInput, Mask};

/// The inputs are `x: [.., n]` and optionally a residual of the same shape and dtype; after that,
/// optionally, a bias `[n]`.
impl<B: Drop, const N: usize> FusedOp<B, N> for Mask {
    /// The last element is the dtype of the bias, if there is one.
    type Saved = (Mask, Option<DType>);

    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
        let ([x], [residual, bias]) = optional(inputs);
        let dtype = bias.as_ref().map(|bias| bias.dtype());
        let y = B::forward(&self, DropoutInput { x, bias, residual });
        (y, (self, dtype))
    }

    fn backward((mask, bias): Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let (dx, dbias) = B::backward(&mask, dy.clone(), bias);
        grads.register_all([Some(dx), Some(dy), dbias]);
    }
}

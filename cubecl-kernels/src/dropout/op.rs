//! Dropout under automatic differentiation. The backward pass regenerates the mask of the forward
//! pass, so no tensor is saved for backward.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::DType;
use megaburn_autograd::{FusedOp, InputGrads, optional};

use super::key::DropoutKey;

/// Determines which elements are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Mask {
    /// The probability of dropping an element, in `[0, 1)`. With 0, `key` is not used.
    pub(super) p: f64,
    pub(super) key: DropoutKey,
}

impl Mask {
    pub(super) fn new(name: &str, p: f64, key: DropoutKey, shape: &[usize]) -> Self {
        assert!(
            (0.0..1.0).contains(&p),
            "{name}: probability {p} is not in [0, 1)"
        );
        key.check(shape);
        Self { p, key }
    }
}

/// The inputs of the fused dropout.
///
/// # Shapes
/// `x` and `residual`: `[.., n]`, of one dtype; `bias`: `[n]`
pub(crate) struct DropoutInput<T> {
    pub(super) x: T,
    /// Added to each row before the mask.
    pub(super) bias: Option<T>,
    /// Added after the mask.
    pub(super) residual: Option<T>,
}

/// Dropout and its backward pass, with the best implementation per backend.
pub(crate) trait Drop: Backend {
    fn forward(mask: &Mask, input: DropoutInput<FloatTensor<Self>>) -> FloatTensor<Self>;

    /// Returns the gradient of `x`, in the dtype of `dy`, and the gradient of the bias if its dtype
    /// is given. (The gradient of the residual is `dy`.)
    fn backward(
        mask: &Mask,
        dy: FloatTensor<Self>,
        bias: Option<DType>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);
}

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

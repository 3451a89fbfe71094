//! The gradient of a tensor inside a graph, for a comparison.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use crate::{
    fused_op::{FusedOp, InputGrads, fused},
    into_primitive::IntoPrimitive,
};

/// The gradient that a backward pass finds for an [`observed`] tensor.
#[derive(Clone, Debug, Default)]
pub struct FoundGradient(Arc<Mutex<Option<Tensor<3>>>>);

impl FoundGradient {
    /// The gradient, off the autodiff device; `None` before the backward pass, and if it did not
    /// reach the tensor.
    pub fn take(&self) -> Option<Tensor<3>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// `x`, and where the backward pass puts the gradient of `x`, which it passes on unchanged.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use megaburn_autograd::observed;
///
/// let x = Tensor::<3>::ones([1, 1, 2], &Device::flex().autodiff()).require_grad();
/// let (y, found) = observed(x * 2.0);
/// assert!(found.take().is_none());
/// (y * 3.0).sum().backward();
/// assert_eq!(found.take().unwrap().into_data(), [[[3.0f32, 3.0]]].into());
/// ```
pub fn observed(x: Tensor<3>) -> (Tensor<3>, FoundGradient) {
    let found = FoundGradient::default();
    let x = fused(Observed(found.clone()), [x.into_dispatch()]);
    (x, found)
}

/// The identity.
#[derive(Debug)]
struct Observed(FoundGradient);

impl<B: IntoPrimitive> FusedOp<B, 1> for Observed {
    type Saved = FoundGradient;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        (x, self.0)
    }

    fn backward(found: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let gradient = B::wrap(dy.clone());
        *found.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
        grads.register(0, dy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{constant, leaf, values};

    #[test]
    fn an_observed_tensor_has_its_gradient_and_changes_none() {
        let x = leaf(constant([2, 3, 4]));
        let other: Tensor<3> = constant([2, 3, 4]);
        let gradient = |y: Tensor<3>| x.grad(&(y * other.clone()).sum().backward()).unwrap();
        let expected = values(gradient(x.clone() * 2.0));
        let (y, found) = observed(x.clone() * 2.0);
        assert_eq!(values(gradient(y)), expected);
        assert_eq!(values(found.take().unwrap()), values(other.clone()));
        let (y, found) = observed(other.clone().inner());
        assert_eq!(values(y), values(other));
        assert!(found.take().is_none());
    }
}

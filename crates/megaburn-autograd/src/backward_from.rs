//! A backward pass from a given output gradient; Burn's own starts from ones.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Shape, Tensor};

use crate::arg_check::{self, float};
use crate::{
    fused_op::{FusedOp, InputGrads, fused, with_autodiff_of},
    into_primitive::IntoPrimitive,
};

/// A scalar whose `backward` starts with the gradient `grad` at `y`. The scalar itself is 0, and
/// multiplying it by a factor has no effect on the gradients.
///
/// `(y * grad).sum()` has the same gradients, but takes three passes over `y`; this takes none.
///
/// # Shapes
/// `y` and `grad` have the same shape; the result is `[1]`
///
/// # Panics
/// If the shapes or dtypes differ.
pub fn backward_from<const D: usize>(y: Tensor<D>, grad: Tensor<D>) -> Tensor<1> {
    assert_eq!(
        y.dims(),
        grad.dims(),
        "backward_from: the shapes of the gradient and its tensor differ"
    );
    assert_eq!(
        y.dtype(),
        grad.dtype(),
        "backward_from: the dtypes of the gradient and its tensor differ"
    );
    arg_check::check("backward_from", [float("y", &y), float("grad", &grad)]);
    let y = with_autodiff_of(y, &grad.device());
    fused(BackwardFrom(grad.inner()), [y.into_dispatch()])
}

/// A scalar whose gradient is replaced by this gradient of its input.
#[derive(Debug)]
struct BackwardFrom<const D: usize>(Tensor<D>);

impl<B: IntoPrimitive, const D: usize> FusedOp<B, 1> for BackwardFrom<D> {
    /// The gradient of the input.
    type Saved = FloatTensor<B>;

    fn forward(self, [y]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let scalar = B::float_zeros(Shape::from([1]), &y.device(), y.dtype().into());
        (scalar, B::unwrap(self.0))
    }

    fn backward(grad: Self::Saved, _: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        grads.register(0, grad);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use rstest::rstest;

    use super::*;
    use crate::testing::{assert_refused, constant, distance, leaf, normal, quantized, values};

    #[test]
    fn gradients_are_those_of_the_weighted_sum() {
        let x = normal([3, 5]);
        let weight = constant([3, 5]);
        let y = |x: &Tensor<2>| x.clone().exp();
        let expected = x.grad(&(y(&x) * weight.clone()).sum().backward()).unwrap();
        let x = leaf(x);
        let found = backward_from(y(&x), Tensor::from_inner(weight.inner()));
        assert_eq!(found.dims(), [1]);
        assert_eq!(distance(x.grad(&found.backward()).unwrap(), expected), 0.0);
    }

    #[rstest]
    #[case([2, 3])]
    #[case([0, 3])]
    fn views_and_nothing_have_their_gradients(#[case] shape: [usize; 2]) {
        let x = normal(shape);
        let grad = constant([shape[1], shape[0]]);
        let found = x
            .grad(&backward_from(x.clone() * 2.0, grad.clone().transpose()).backward())
            .unwrap();
        assert_eq!(values(found), values(grad.transpose() * 2.0));
    }

    #[rstest]
    #[case(|| drop(backward_from(normal([2, 2]), constant([2, 1]))), "backward_from: the shapes of the gradient and its tensor differ")]
    #[case(|| drop(backward_from(normal([2, 2]), constant([2, 2]).cast(DType::F64))), "backward_from: the dtypes of the gradient and its tensor differ")]
    #[case(|| drop(backward_from(quantized([2, 4]), quantized([2, 4]))), "backward_from: y is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

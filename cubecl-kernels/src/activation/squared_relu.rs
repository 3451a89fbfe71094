//! The squared rectifier (So et al., 2021, arXiv:2109.08668), Nemotron's activation.

use burn::tensor::Tensor;

use super::op::{Activation, PointwiseFn};
use super::{plain, weighted};

/// `max(x, 0)^2`.
///
/// Computed in f32 (f64 for f64); the result has the dtype of the input. Only the input is saved
/// for backward; the backward pass recomputes the rest.
///
/// # Shapes
/// - `x`, result: `[..]`
pub fn squared_relu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    plain("squared_relu", PointwiseFn::SquaredRelu, x)
}

/// [`squared_relu`] with each row multiplied by a weight (the router's probability of a token's
/// expert). The weights get a gradient.
///
/// # Shapes
/// - `x`, result: `[.., f]`
/// - `weight`: `[tokens]`, one per row of `x`
///
/// # Panics
/// If the number of weights differs from the number of rows, or rows are empty.
pub fn squared_relu_weighted<const D: usize>(x: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    let activation = Activation {
        curve: PointwiseFn::SquaredRelu,
        gated: false,
    };
    weighted("squared_relu_weighted", activation, x, weight)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_refused, assert_same_function, leaf, normal, quantized,
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 16], [7, 3, 5])] shape: [usize; 3],
        #[values((DType::F32, 2e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal(shape) * 3.0).cast(dtype));
        let weight = leaf(normal([shape[0] * shape[1]]).cast(dtype));
        let slow = crate::activation::reference::squared_relu::squared_relu(x.clone());
        assert_same_function!(tolerance, [x], squared_relu(x.clone()), slow);
        assert_same_function!(
            tolerance,
            [x, weight],
            squared_relu_weighted(x.clone(), weight.clone()),
            crate::activation::reference::squared_relu::squared_relu_weighted(
                x.clone(),
                weight.clone()
            )
        );
    }

    #[rstest]
    #[case(|| drop(squared_relu(quantized([2, 4]))), "squared_relu: x is qfloat")]
    #[case(|| drop(squared_relu_weighted(normal([2, 4]), normal([4]))), "squared_relu_weighted: 4 weights do not match 2 rows")]
    #[case(|| drop(squared_relu_weighted(normal([2, 0]), normal([2]))), "x is [2, 0], its rows are empty")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

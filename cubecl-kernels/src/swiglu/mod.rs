//! The gated activation of Llama's feed-forward (Shazeer, 2020, arXiv:2002.05202).

pub(crate) mod reference;

use burn::tensor::Tensor;

use crate::activation::{Curve, gated};

/// `silu(gate) * up`, where `gate` is the first half of the last dimension and `up` the second.
///
/// Computed in f32 (f64 for f64), result in the dtype of the input. The backward computes everything
/// again from the input, which is all it keeps.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd.
pub fn swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    gated("swiglu", Curve::Silu, gate_up, None)
}

/// [`swiglu`], each row times its weight (the router's probability of a token's expert), with a
/// gradient of the weights.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - `weight`: `[tokens]`, as many as rows of `gate_up`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd, or there are more or fewer weights than rows.
pub fn swiglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    gated("swiglu_weighted", Curve::Silu, gate_up, Some(weight))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, activation::silu};
    use rstest::rstest;

    use super::*;
    use crate::testing::{assert_same_bits, assert_same_function, constant, leaf, normal};

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 16], [7, 3, 10])] shape: [usize; 3],
        #[values((DType::F32, 2e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal(shape) * 3.0).cast(dtype));
        assert_same_function!(tolerance, [x], swiglu(x.clone()), reference::swiglu(x.clone()));
    }

    #[rstest]
    fn weights_and_their_gradients_are_those_of_the_reference(
        #[values((DType::F32, 2e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal([5, 3, 14]) * 3.0).cast(dtype));
        let weight = normal([15]);
        assert_same_function!(
            tolerance,
            [x, weight],
            swiglu_weighted(x.clone(), weight.clone()),
            reference::swiglu_weighted(x.clone(), weight.clone())
        );
    }

    #[test]
    fn f32_results_are_bit_for_bit_those_of_burn() {
        let x = constant([5, 3, 14]);
        let burn = silu(x.clone().narrow(2, 0, 7)) * x.clone().narrow(2, 7, 7);
        assert_same_bits(swiglu(x), burn);
    }

    #[test]
    #[should_panic(expected = "the last dimension, 7,")]
    fn an_odd_dimension_is_refused() {
        swiglu(normal([2, 7]));
    }
}

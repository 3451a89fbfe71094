//! The gated activation of Llama's MLP (Shazeer, 2020, arXiv:2002.05202).

use burn::tensor::Tensor;
use megaburn_autograd::fused;

use super::op::{Activation, Observed, PointwiseFn};
use super::{check_gated, gated};
use crate::quantized::FoundAmax;

/// `silu(gate) * up`, where `gate` is the first half of the last dimension and `up` the second.
///
/// Computed in f32 (f64 for f64); the result has the dtype of the input. Only the input is saved
/// for backward; the backward pass recomputes the rest.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd.
pub fn swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    gated("swiglu", PointwiseFn::Silu, gate_up, None)
}

/// [`swiglu`] whose kernels find the largest magnitudes of the result and of the gradient of
/// `gate_up`, for the layers that quantise them.
///
/// # Shapes
/// As [`swiglu`].
///
/// # Panics
/// As [`swiglu`].
pub fn swiglu_observed<const D: usize>(
    gate_up: Tensor<D>,
    result: FoundAmax,
    gradient: FoundAmax,
) -> Tensor<D> {
    check_gated("swiglu_observed", &gate_up);
    let observed = Observed {
        activation: Activation {
            curve: PointwiseFn::Silu,
            gated: true,
        },
        result,
        gradient,
    };
    fused(observed, [gate_up.into_dispatch()])
}

/// [`swiglu`] with each row multiplied by a weight (the router's probability of a token's expert).
/// The weights get a gradient.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - `weight`: `[tokens]`, one per row of `gate_up`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd or empty, or the number of weights differs from the number of rows.
pub fn swiglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    gated("swiglu_weighted", PointwiseFn::Silu, gate_up, Some(weight))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, activation::silu};
    use megaburn_autograd::testing::{
        assert_refused, assert_same_bits, assert_same_function, constant, leaf, normal, quantized,
        values,
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 16], [7, 3, 10])] shape: [usize; 3],
        #[values((DType::F32, 2e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal(shape) * 3.0).cast(dtype));
        assert_same_function!(
            tolerance,
            [x],
            swiglu(x.clone()),
            crate::activation::reference::swiglu::swiglu(x.clone())
        );
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
            crate::activation::reference::swiglu::swiglu_weighted(x.clone(), weight.clone())
        );
    }

    #[test]
    fn f32_results_are_bit_for_bit_those_of_burn() {
        let x = constant([5, 3, 14]);
        let burn = silu(x.clone().narrow(2, 0, 7)) * x.clone().narrow(2, 7, 7);
        assert_same_bits(swiglu(x), burn);
    }

    #[rstest]
    fn observed_magnitudes_are_those_of_result_and_gradient(
        #[values([4, 2, 16], [7, 3, 10], [0, 3, 8])] shape: [usize; 3],
        #[values(DType::F32, DType::BF16)] dtype: DType,
    ) {
        let x = leaf((normal(shape) * 3.0).cast(dtype));
        let found = [FoundAmax::default(), FoundAmax::default()];
        let [result, gradient] = found.clone();
        let y = swiglu_observed(x.clone(), result, gradient);
        let expected = swiglu(leaf(x.clone()));
        assert_same_bits(y.clone().inner(), expected.inner());
        let dy = constant(y.dims()).cast(dtype);
        let dx = x.grad(&(y.clone() * dy).sum().backward()).unwrap();
        for (found, of) in found.iter().zip([y.inner(), dx]) {
            let largest = values(of)
                .into_iter()
                .fold(0.0, |most: f64, x| most.max(x.abs()));
            assert_eq!(values(found.value().unwrap()), [largest]);
            assert!(found.take::<burn::backend::Flex>().is_some());
            assert!(found.value().is_none(), "it is taken once");
        }
    }

    #[test]
    fn views_are_those_of_the_reference() {
        let x = normal([3, 5, 12]);
        let weight = normal([5, 2]);
        let view = || x.clone().swap_dims(0, 1).narrow(2, 1, 8);
        let weights = || {
            weight
                .clone()
                .repeat_dim(1, 3)
                .narrow(1, 1, 3)
                .reshape([15])
        };
        assert_same_function!(
            2e-6,
            [x],
            swiglu(view()),
            crate::activation::reference::swiglu::swiglu(view())
        );
        assert_same_function!(
            2e-6,
            [x, weight],
            swiglu_weighted(view(), weights()),
            crate::activation::reference::swiglu::swiglu_weighted(view(), weights())
        );
    }

    #[rstest]
    #[case([0, 3, 8], [0, 3, 4])]
    #[case([2, 3, 0], [2, 3, 0])]
    fn nothing_gives_nothing(#[case] shape: [usize; 3], #[case] expected: [usize; 3]) {
        let x = normal(shape);
        let y = swiglu(x.clone());
        assert_eq!(y.dims(), expected);
        assert_eq!(x.grad(&y.sum().backward()).unwrap().dims(), shape);
        if shape[2] > 0 {
            let weight = normal([shape[0] * shape[1]]);
            let y = swiglu_weighted(x, weight.clone());
            assert_eq!(y.dims(), expected);
            assert_eq!(
                weight.grad(&y.sum().backward()).unwrap().dims(),
                weight.dims()
            );
        }
    }

    #[rstest]
    #[case::odd(|| drop(swiglu(normal([2, 7]))), "swiglu: the last dimension, 7,")]
    #[case::dtype(|| drop(swiglu(quantized([2, 8]))), "swiglu: gate_up is qfloat")]
    #[case::weights(|| drop(swiglu_weighted(normal([2, 8]), normal([1]))), "swiglu_weighted: 1 weights do not match 2 rows")]
    #[case::no_columns(|| drop(swiglu_weighted(normal([2, 0]), normal([2]))), "x is [2, 0], its rows are empty")]
    #[case::dtype_of_weights(|| drop(swiglu_weighted(normal([4, 8]), quantized([4]))), "the weight is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

//! The gated activation of gpt-oss (OpenAI, 2025): SwiGLU with limited inputs.

use burn::tensor::Tensor;

use super::gated;
use super::op::PointwiseFn;

/// `gate * sigmoid(1.702 gate) * (up + 1)`, where `gate` is the first half of the last dimension, at
/// most 7, and `up` the second half, limited to `[-7, 7]`.
///
/// Computed in f32 (f64 for f64); the result has the dtype of the input. Only the input is saved
/// for backward; the backward pass recomputes the rest. Inputs beyond a limit have no gradient.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd.
pub fn clamped_swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    gated("clamped_swiglu", PointwiseFn::ClampedSilu, gate_up, None)
}

/// [`clamped_swiglu`] with each row multiplied by a weight (the router's probability of a token's
/// expert). The weights get a gradient.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - `weight`: `[tokens]`, one per row of `gate_up`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd or empty, or the number of weights differs from the number of rows.
pub fn clamped_swiglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    let name = "clamped_swiglu_weighted";
    gated(name, PointwiseFn::ClampedSilu, gate_up, Some(weight))
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_refused, assert_same_function, leaf, normal, quantized,
    };
    use rstest::rstest;

    use super::*;

    // Inputs with a deviation of 6 are beyond the limits in about a fifth of the cases.
    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 16], [7, 3, 10])] shape: [usize; 3],
        #[values((DType::F32, 3e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal(shape) * 6.0).cast(dtype));
        let weight = leaf(normal([shape[0] * shape[1]]).cast(dtype));
        assert_same_function!(
            tolerance,
            [x],
            clamped_swiglu(x.clone()),
            crate::activation::reference::clamped_swiglu::clamped_swiglu(x.clone())
        );
        assert_same_function!(
            tolerance,
            [x, weight],
            clamped_swiglu_weighted(x.clone(), weight.clone()),
            crate::activation::reference::clamped_swiglu::clamped_swiglu_weighted(
                x.clone(),
                weight.clone()
            )
        );
    }

    #[test]
    fn inputs_at_the_limits_are_as_in_pytorch() {
        let x = leaf(Tensor::<1>::from_floats(
            [7.0, 9.0, -3.0, 7.0, -7.5, 2.0],
            &Default::default(),
        ));
        let y = clamped_swiglu(x.clone());
        let share = |x: f32| x / (1.0 + (-1.702 * x).exp());
        let expected = [share(7.0) * 8.0, share(7.0) * -6.0, share(-3.0) * 3.0];
        for (found, expected) in y.clone().into_data().iter::<f32>().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
        }
        let grads = y.sum().backward();
        let found: Vec<f32> = x.grad(&grads).unwrap().into_data().iter().collect();
        // A limit itself has a gradient; what lies beyond has none.
        assert!(found[0] > 7.9 && found[1] == 0.0 && found[3] > 6.9 && found[4] == 0.0);
    }

    #[rstest]
    #[case(|| drop(clamped_swiglu(normal([2, 7]))), "clamped_swiglu: the last dimension, 7,")]
    #[case(|| drop(clamped_swiglu(quantized([2, 8]))), "clamped_swiglu: gate_up is qfloat")]
    #[case(
        || drop(clamped_swiglu_weighted(normal([2, 8]), normal([3]))),
        "clamped_swiglu_weighted: 3 weights do not match 2 rows"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

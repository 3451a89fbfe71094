//! The gated activation of Gemma's MLP (Shazeer, 2020, arXiv:2002.05202).

use burn::tensor::Tensor;

use super::gated;
use super::op::PointwiseFn;

/// `gelu(gate) * up`, where `gate` is the first half of the last dimension and `up` the second.
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
pub fn geglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    gated("geglu", PointwiseFn::Gelu, gate_up, None)
}

/// [`geglu`] with [`gelu_tanh`](crate::gelu_tanh) in place of `gelu` (as in Megatron and Gemma).
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd.
pub fn geglu_tanh<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    gated("geglu_tanh", PointwiseFn::GeluTanh, gate_up, None)
}

/// [`geglu`] with each row multiplied by a weight (the router's probability of a token's expert).
/// The weights get a gradient.
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - `weight`: `[tokens]`, one per row of `gate_up`
/// - result: `[.., f]`
///
/// # Panics
/// If the last dimension is odd or empty, or the number of weights differs from the number of rows.
pub fn geglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    gated("geglu_weighted", PointwiseFn::Gelu, gate_up, Some(weight))
}

/// [`geglu_weighted`] with [`gelu_tanh`](crate::gelu_tanh).
///
/// # Shapes
/// - `gate_up`: `[.., 2f]`
/// - `weight`: `[tokens]`, one per row of `gate_up`
/// - result: `[.., f]`
///
/// # Panics
/// As [`geglu_weighted`].
pub fn geglu_tanh_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    gated(
        "geglu_tanh_weighted",
        PointwiseFn::GeluTanh,
        gate_up,
        Some(weight),
    )
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
        #[values([4, 2, 16], [7, 3, 10])] shape: [usize; 3],
        #[values((DType::F32, 3e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal(shape) * 3.0).cast(dtype));
        let weight = leaf(normal([shape[0] * shape[1]]).cast(dtype));
        assert_same_function!(
            tolerance,
            [x],
            geglu(x.clone()),
            crate::activation::reference::geglu::geglu(x.clone())
        );
        let reference = crate::activation::reference::geglu::geglu_tanh(x.clone());
        assert_same_function!(tolerance, [x], geglu_tanh(x.clone()), reference);
        assert_same_function!(
            tolerance,
            [x, weight],
            geglu_weighted(x.clone(), weight.clone()),
            crate::activation::reference::geglu::geglu_weighted(x.clone(), weight.clone())
        );
        assert_same_function!(
            tolerance,
            [x, weight],
            geglu_tanh_weighted(x.clone(), weight.clone()),
            crate::activation::reference::geglu::geglu_tanh_weighted(x.clone(), weight.clone())
        );
    }

    #[rstest]
    #[case(|| drop(geglu(normal([2, 7]))), "geglu: the last dimension, 7,")]
    #[case(|| drop(geglu_tanh(quantized([2, 8]))), "geglu_tanh: gate_up is qfloat")]
    #[case(|| drop(geglu_weighted(normal([2, 8]), normal([3]))), "geglu_weighted: 3 weights do not match 2 rows")]
    #[case(|| drop(geglu_tanh_weighted(normal([2, 5]), normal([2]))), "geglu_tanh_weighted: the last dimension, 5,")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

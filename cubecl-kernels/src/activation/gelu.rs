//! The Gaussian error linear unit (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
//!
//! Both forms are computed in f32 (f64 for f64); the result has the dtype of `x`. Only the input is
//! saved for backward; the backward pass recomputes the rest.

use burn::tensor::Tensor;

use super::op::PointwiseFn;
use super::{biased, plain};
use crate::bias::Bias;

/// `x * Phi(x)` with the exact normal distribution function (Hugging Face's `gelu`).
///
/// # Shapes
/// - `x`, result: `[..]`
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    plain("gelu", PointwiseFn::Gelu, x)
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))` (Hugging Face's `gelu_new` and
/// `gelu_pytorch_tanh`, GPT-2's activation).
///
/// # Shapes
/// - `x`, result: `[..]`
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    plain("gelu_tanh", PointwiseFn::GeluTanh, x)
}

/// [`gelu`] of `x + bias`, in one pass over memory on a GPU.
///
/// # Shapes
/// - `x`, result: `[.., f]`
/// - `bias`: `[f]`
///
/// # Panics
/// If the bias is not as long as the last dimension of `x`.
pub fn bias_gelu<const D: usize>(x: Tensor<D>, bias: impl Into<Bias>) -> Tensor<D> {
    biased("bias_gelu", PointwiseFn::Gelu, x, bias.into())
}

/// [`gelu_tanh`] of `x + bias`, in one pass over memory on a GPU (Megatron's `bias_gelu`).
///
/// # Shapes
/// - `x`, result: `[.., f]`
/// - `bias`: `[f]`
///
/// # Panics
/// If the bias is not as long as the last dimension of `x`.
pub fn bias_gelu_tanh<const D: usize>(x: Tensor<D>, bias: impl Into<Bias>) -> Tensor<D> {
    biased("bias_gelu_tanh", PointwiseFn::GeluTanh, x, bias.into())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Tensor};
    use megaburn_autograd::testing::{
        assert_refused, assert_same_function, device, leaf, normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;

    /// Rows of x, gelu, its derivative, gelu_tanh, its derivative.
    ///
    /// From Python's `math.erf`, `math.exp` and `math.tanh` in double precision.
    const TABLE: [[f64; 5]; 7] = [
        [-6.0, -0.000000006, -0.000000035, -0.000000000, -0.000000001],
        [-2.5, -0.015524163, -0.037611086, -0.015084266, -0.037951576],
        [-0.75, -0.169970514, 0.000774278, -0.170039445, 0.001061744],
        [0.0, 0.000000000, 0.500000000, 0.000000000, 0.500000000],
        [0.5, 0.345731231, 0.867495125, 0.345714010, 0.867369904],
        [1.25, 1.117937783, 1.122661583, 1.117714203, 1.122492632],
        [4.0, 3.999873315, 1.000503650, 3.999929754, 1.000335123],
    ];

    type Activation = fn(Tensor<1>) -> Tensor<1>;

    #[rstest]
    #[case(gelu, 1)]
    #[case(gelu_tanh, 3)]
    fn values_and_slopes_are_those_of_double_precision(
        #[case] activation: Activation,
        #[case] column: usize,
    ) {
        let inputs = TABLE.map(|row| row[0] as f32);
        let x = Tensor::<1>::from_floats(inputs, &device()).require_grad();
        let y = activation(x.clone());
        let slope = x.grad(&y.clone().sum().backward()).expect("gradient");
        for (i, (y, slope)) in values(y).into_iter().zip(values(slope)).enumerate() {
            assert!((y - TABLE[i][column]).abs() < 1e-6, "{i}: {y}");
            assert!((slope - TABLE[i][column + 1]).abs() < 1e-6, "{i}: {slope}");
        }
    }

    #[rstest]
    fn values_and_gradients_with_a_bias_are_those_of_the_reference(
        #[values((DType::F32, 2e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf((normal([5, 3, 7]) * 2.0).cast(dtype));
        let bias = normal([7]);
        assert_same_function!(
            tolerance,
            [x, bias],
            bias_gelu(x.clone(), bias.clone()),
            crate::activation::reference::gelu::bias_gelu(x.clone(), bias.clone())
        );
        assert_same_function!(
            tolerance,
            [x, bias],
            bias_gelu_tanh(x.clone(), bias.clone()),
            crate::activation::reference::gelu::bias_gelu_tanh(x.clone(), bias.clone())
        );
    }

    #[test]
    fn views_are_those_of_the_reference() {
        let x = normal([3, 5, 12]);
        let bias = normal([1]);
        let view = || x.clone().swap_dims(0, 2).narrow(0, 3, 8);
        let biased = || (view(), bias.clone().expand([3]));
        assert_same_function!(
            2e-6,
            [x],
            gelu(view()),
            crate::activation::reference::gelu::gelu(view())
        );
        let fast = |(x, bias)| bias_gelu_tanh::<3>(x, bias);
        let slow = |(x, bias)| crate::activation::reference::gelu::bias_gelu_tanh::<3>(x, bias);
        // The bias gradient is one sum over all rows, and the two versions add in different orders.
        assert_same_function!(1e-5, [x, bias], fast(biased()), slow(biased()));
    }

    #[rstest]
    #[case([0, 3, 4])]
    #[case([2, 3, 0])]
    fn nothing_gives_nothing_and_a_bias_a_gradient_of_0(#[case] shape: [usize; 3]) {
        let x = normal(shape);
        let bias = normal([shape[2]]);
        let y = bias_gelu(x.clone(), bias.clone());
        assert_eq!((y.dims(), gelu(x.clone()).dims()), (shape, shape));
        let grads = y.sum().backward();
        assert_eq!(x.grad(&grads).unwrap().dims(), shape);
        assert_eq!(values(bias.grad(&grads).unwrap()), vec![0.0; shape[2]]);
    }

    #[rstest]
    #[case(|| drop(bias_gelu(normal([2, 4]), normal([3]))), "bias_gelu: the bias has 3 elements, but rows have 4")]
    #[case(|| drop(bias_gelu_tanh(normal([2, 4]), quantized([4]))), "bias_gelu_tanh: the bias is qfloat")]
    #[case(|| drop(gelu(quantized([2, 4]))), "gelu: x is qfloat")]
    #[case(|| drop(gelu_tanh(quantized([2, 4]))), "gelu_tanh: x is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }

    #[rstest]
    #[case(gelu)]
    #[case(gelu_tanh)]
    fn half_precision_is_rounded_once(
        #[case] activation: Activation,
        #[values(DType::BF16, DType::F16)] dtype: DType,
    ) {
        let inputs: Vec<f32> = (-40..40).map(|i| i as f32 / 8.0).collect();
        let x = leaf(Tensor::<1>::from_floats(inputs.as_slice(), &device()).cast(dtype));
        let y = activation(x.clone());
        assert_eq!(y.dtype(), dtype);
        // These inputs are exactly representable in both dtypes.
        let exact = leaf(Tensor::<1>::from_floats(inputs.as_slice(), &device()));
        let exact_y = activation(exact.clone());
        let slopes = x.grad(&y.clone().sum().backward()).expect("gradient");
        let exact_slopes = exact
            .grad(&exact_y.clone().sum().backward())
            .expect("gradient");
        assert_eq!(values(y), values(exact_y.cast(dtype)));
        assert_eq!(values(slopes), values(exact_slopes.cast(dtype)));
    }
}

//! The Gaussian error linear unit (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
//!
//! Burn's own two forms are these on CPUs, the first with a fused backward. On GPUs the backward of
//! Burn's first form is that of the second (6e-4 off), so it is composed here.
//! Both are computed in f32 (f64 for f64), result in the dtype of `x`: composed of bf16 operations,
//! the second would be rounded eight times.

use std::f64::consts::FRAC_1_SQRT_2;

use burn::tensor::{Tensor, activation};

use crate::{optimizer::is_on_gpu, primitive::compute_dtype};

/// `x * Phi(x)` with the exact normal distribution function (Hugging Face's `gelu`).
///
/// # Shapes
/// - `x`, result: `[..]`
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    wide(x, |x| match is_on_gpu(&x) {
        true => (x.clone().mul_scalar(FRAC_1_SQRT_2).erf() + 1.0) * x * 0.5,
        false => activation::gelu(x),
    })
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))` (Hugging Face's `gelu_new` and
/// `gelu_pytorch_tanh`, GPT-2's activation).
///
/// # Shapes
/// - `x`, result: `[..]`
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    wide(x, activation::gelu_approximate)
}

/// `f` computed in the compute dtype.
fn wide<const D: usize>(x: Tensor<D>, f: impl FnOnce(Tensor<D>) -> Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    f(x.cast(compute_dtype(dtype))).cast(dtype)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Tensor};
    use rstest::rstest;

    use super::*;
    use crate::testing::{device, leaf, values};

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
        // These inputs are numbers of either type.
        let exact = leaf(Tensor::<1>::from_floats(inputs.as_slice(), &device()));
        let exact_y = activation(exact.clone());
        let slopes = x.grad(&y.clone().sum().backward()).expect("gradient");
        let exact_slopes = exact.grad(&exact_y.clone().sum().backward()).expect("gradient");
        assert_eq!(values(y), values(exact_y.cast(dtype)));
        assert_eq!(values(slopes), values(exact_slopes.cast(dtype)));
    }
}

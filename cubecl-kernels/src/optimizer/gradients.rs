//! Operations on a gradient before the step: sums of squares and scaling.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::arg_check::{self, float};

use super::checks::{kept, one};
#[cfg(feature = "cuda")]
use super::launch::gradients as launch;
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// Returns `x * factor` without its graph, computed in place where no other tensor shares `x`.
///
/// # Shapes
/// `x: [n]`, f32, bf16 or f16; `factor: [1]`, f32, on the same device
///
/// # Panics
/// If `x` or `factor` has another dtype, or `factor` another shape.
pub fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    arg_check::check("scaled", [kept("x", &x), one("scaled", &factor)]);
    let x = x.inner();
    let factor = factor.inner();
    #[cfg(feature = "cuda")]
    if is_on_gpu(&x) {
        return launch::scaled(x, factor);
    }
    let dtype = x.dtype();
    (x.cast(DType::F32) * factor).cast(dtype)
}

/// Adds the partial sums of [`partial_sums_of_squares`], of one tensor or of several concatenated
/// ones. On GPUs the sum is in f64 and in a fixed order; the host does not wait for it.
///
/// # Shapes
/// `[any]` to `[1]`, f32
///
/// # Panics
/// For sums of another dtype.
pub fn total(sums: Tensor<1>) -> Tensor<1> {
    arg_check::check("total", [float("sums", &sums).of(&[DType::F32])]);
    let sums = sums.inner();
    #[cfg(feature = "cuda")]
    if is_on_gpu(&sums) {
        return launch::total(sums);
    }
    sums.sum()
}

/// Partial sums of the squares of some tensors, to be added with [`total`]. On GPUs there are about
/// a thousand, in a fixed order; one launch handles all f32 tensors that consist of 16-byte
/// vectors. Elsewhere there is one per tensor.
///
/// # Shapes
/// `[n]` each, f32, bf16 or f16, on one device, to `[any]`, f32. A non-finite value makes its
/// partial sum non-finite.
///
/// # Panics
/// If a tensor has another dtype, or there are no tensors.
pub fn partial_sums_of_squares(tensors: Vec<Tensor<1>>) -> Tensor<1> {
    assert!(
        !tensors.is_empty(),
        "partial_sums_of_squares: there must be at least one tensor"
    );
    arg_check::check(
        "partial_sums_of_squares",
        tensors.iter().map(|x| kept("x", x)),
    );
    let tensors: Vec<_> = tensors.into_iter().map(Tensor::inner).collect();
    #[cfg(feature = "cuda")]
    if is_on_gpu(&tensors[0]) {
        return launch::sums_of_squares(tensors);
    }
    let sum = |x: Tensor<1>| x.cast(DType::F32).square().sum();
    Tensor::cat(tensors.into_iter().map(sum).collect(), 0)
}

#[cfg(test)]
mod tests {
    use burn::tensor::s;
    use megaburn_autograd::testing::{assert_refused, constant, device, quantized, values};
    use rstest::rstest;

    use super::*;
    use crate::gpu::is_on_gpu;
    use crate::optimizer::factor;

    #[test]
    fn squares_are_summed_and_nan_is_kept() {
        let x = constant([1000]);
        let expected: f64 = values(x.clone()).iter().map(|x| x * x).sum();
        let found: f64 = values(partial_sums_of_squares(vec![x.clone()]))
            .iter()
            .sum();
        assert!((found - expected).abs() < 1e-4 * expected);
        let twice = values(partial_sums_of_squares(vec![x.clone(), x.clone()]));
        assert!((twice.iter().sum::<f64>() - 2.0 * expected).abs() < 1e-4 * expected);
        let bad = x.clone().slice_fill(10..11, f32::NAN);
        assert!(
            values(partial_sums_of_squares(vec![x.clone(), bad]))
                .iter()
                .sum::<f64>()
                .is_nan()
        );
        assert!(!is_on_gpu(&constant([3])));
        assert_eq!(values(total(factor(3.0).repeat(&[4]))), [12.0]);
        assert_eq!(values(scaled(factor(3.0), factor(-2.0))), [-6.0]);
    }

    #[test]
    fn views_are_read() {
        // A strided view: every fourth element, from the second on.
        let grad = constant([40]).slice(s![1..;4]);
        let copy = || Tensor::from_data(grad.clone().into_data(), &device());
        let squares = |x| values(partial_sums_of_squares(vec![x]));
        assert_eq!(squares(grad.clone()), squares(copy()));
        let twice = |x| values(scaled(x, factor(2.0)));
        assert_eq!(twice(grad.clone()), twice(copy()));
        assert_eq!(values(total(grad.clone())), values(total(copy())));
    }

    #[test]
    fn the_squares_of_nothing_are_zero() {
        let none = || Tensor::<1>::empty([0], &device().inner());
        assert_eq!(scaled(none(), factor(1.0)).dims(), [0]);
        assert_eq!(values(total(partial_sums_of_squares(vec![none()]))), [0.0]);
        assert_eq!(values(total(none())), [0.0]);
    }

    #[rstest]
    #[case(|| drop(scaled(constant([3]), constant([2]))), "scaled: the factor on the device must be [1], not [2]")]
    #[case(|| drop(scaled(constant([3]), constant([1]).cast(DType::BF16))), "the factor is bf16, not f32")]
    #[case(|| drop(scaled(constant([3]).cast(DType::F64), factor(1.0))), "scaled: x is f64")]
    #[case(|| drop(total(constant([3]).cast(DType::F16))), "total: sums is f16, not f32")]
    #[case(|| drop(partial_sums_of_squares(vec![constant([2]), quantized([4])])), "partial_sums_of_squares: x is qfloat")]
    #[case(|| drop(partial_sums_of_squares(vec![])), "there must be at least one tensor")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

//! Root-mean-square normalization (Zhang and Sennrich, 2019, arXiv:1910.07467).

use burn::tensor::Tensor;

use super::check;
use super::op::{NormCall, norm, norm_add};
use super::options::NormOptions;

/// `x / sqrt(mean(x^2) + epsilon) * gamma` over the last dimension.
///
/// Statistics and product are computed in f32; the result has the dtype of `x`. On f32 tensors of a
/// CPU the result equals `burn::nn::RmsNorm` bit for bit. The backward pass is handwritten; it
/// saves `x`, `rms` (on a GPU its inverse) and `gamma`.
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `gamma`: `[n]`
///
/// # Panics
/// If `gamma` is not as long as the last dimension of `x`, that is empty, or epsilon is negative or
/// not finite.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    rms_norm_with(x, gamma, NormOptions::new(epsilon))
}

/// [`rms_norm`] with options.
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `gamma`: `[n]`
///
/// # Panics
/// As [`rms_norm`].
pub fn rms_norm_with<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    options: NormOptions,
) -> Tensor<D> {
    let call = NormCall::rms(options);
    check("rms_norm", &x, &gamma, None, &call);
    norm(x, gamma, None, call)
}

/// Returns the [`rms_norm`] of `x + residual`, and the sum itself in the dtype of `x`.
///
/// On a GPU this is one pass over memory, with one backward kernel for both gradients. The norm is
/// computed from the returned, rounded sum, so [`rms_norm`] of that sum has the same bits if the
/// rows of `x` and `residual` are contiguous.
///
/// # Shapes
/// - `x`, `residual`, results: `[.., n]`
/// - `gamma`: `[n]`
///
/// # Panics
/// As [`rms_norm`], or if `x` and `residual` differ in shape or dtype.
pub fn rms_norm_add<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    options: impl Into<NormOptions>,
) -> (Tensor<D>, Tensor<D>) {
    let call = NormCall::rms(options);
    check("rms_norm_add", &x, &gamma, None, &call);
    norm_add("rms_norm_add", [x, residual], gamma, None, call)
}

#[cfg(test)]
mod tests {
    use burn::nn::RmsNormConfig;
    use burn::tensor::{DType, Device};
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, constant, device,
        leaf, normal, normal_on, quantized, values,
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values(1e-5, 0.3)] epsilon: f64,
    ) {
        let x = normal(shape);
        let gamma = normal([shape[2]]);
        assert_same_function!(
            2e-6,
            [x, gamma],
            rms_norm(x.clone(), gamma.clone(), epsilon),
            crate::norms::reference::rms_norm::rms_norm(x.clone(), gamma.clone(), epsilon)
        );
    }

    #[rstest]
    fn f32_results_are_bit_for_bit_those_of_burn(#[values([4, 2, 64], [3, 5, 7])] s: [usize; 3]) {
        for device in [Device::flex(), device()] {
            let mut norm = RmsNormConfig::new(s[2]).with_epsilon(1e-6).init(&device);
            norm.gamma = norm.gamma.map(|_| normal_on([s[2]], &device));
            let x = normal_on(s, &device);
            let fast = rms_norm(x.clone(), norm.gamma.val(), 1e-6);
            assert_same_bits(fast, norm.forward(x));
        }
    }

    #[rstest]
    #[case(DType::F16, 2e-3)]
    #[case(DType::BF16, 1e-2)]
    fn half_precision_keeps_f32_statistics(#[case] dtype: DType, #[case] tolerance: f64) {
        // A sum of squares of 300 * 300 * 200 overflows f16.
        let x = leaf((normal([3, 1, 200]) * 300.0).cast(dtype));
        let gamma = leaf(normal([200]).cast(dtype));
        let y = rms_norm(x.clone(), gamma.clone(), 1e-5);
        assert_eq!(y.dtype(), dtype);
        let wide = |t: Tensor<3>| t.cast(DType::F32);
        let exact = rms_norm(wide(x.clone()), gamma.clone().cast(DType::F32), 1e-5);
        assert_close(wide(y), exact, tolerance);
        assert_same_function!(
            tolerance,
            [x, gamma],
            rms_norm(x.clone(), gamma.clone(), 1e-5),
            crate::norms::reference::rms_norm::rms_norm(x.clone(), gamma.clone(), 1e-5)
        );
    }

    #[rstest]
    fn options_and_residual_sums_are_those_of_the_reference(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values((DType::F32, 3e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf(normal(shape).cast(dtype));
        let residual = leaf(normal(shape).cast(dtype));
        let gamma = normal([shape[2]]);
        let options = NormOptions::new(1e-3).with_zero_centered_gamma(true);
        assert_same_function!(
            tolerance,
            [x, gamma],
            rms_norm_with(x.clone(), gamma.clone(), options.clone()),
            crate::norms::reference::rms_norm::rms_norm_with(
                x.clone(),
                gamma.clone(),
                options.clone()
            )
        );
        let join = |(y, sum)| Tensor::cat(vec![y, sum], 0);
        assert_same_function!(
            tolerance,
            [x, residual, gamma],
            join(rms_norm_add(
                x.clone(),
                residual.clone(),
                gamma.clone(),
                options.clone()
            )),
            join(crate::norms::reference::rms_norm::rms_norm_add(
                x.clone(),
                residual.clone(),
                gamma.clone(),
                options.clone()
            ))
        );
    }

    #[test]
    fn a_residual_sum_has_gradients_of_whichever_result_is_used() {
        let x = normal([4, 6]);
        let residual = normal([4, 6]);
        let gamma = normal([6]);
        let both = || rms_norm_add(x.clone(), residual.clone(), gamma.clone(), 1e-5);
        let grads = both().1.sum().backward();
        assert_close(
            x.grad(&grads).expect("gradient"),
            Tensor::ones_like(&x).inner(),
            0.0,
        );
        assert!(gamma.grad(&grads).is_none());
        let grads = both().0.sum().backward();
        assert!(gamma.grad(&grads).is_some() && residual.grad(&grads).is_some());
        // The sum feeds a second norm, whose gradient arrives before that of the first.
        let chain = |first: (Tensor<2>, Tensor<2>), gamma| {
            let (y, sum) = first;
            let (z, sum) = rms_norm_add(y.clone() * 2.0, sum, gamma, 1e-5);
            z * y + sum
        };
        assert_same_function!(3e-6, [x, residual, gamma], chain(both(), gamma.clone()), {
            let sum = x.clone() + residual.clone();
            let y = crate::norms::reference::rms_norm::rms_norm(sum.clone(), gamma.clone(), 1e-5);
            let sum = y.clone() * 2.0 + sum;
            crate::norms::reference::rms_norm::rms_norm(sum.clone(), gamma.clone(), 1e-5) * y + sum
        });
    }

    #[test]
    fn views_are_normed_as_their_copies() {
        let x = normal([3, 5, 12]);
        let residual = normal([5, 3, 8]);
        let gamma = normal([1]);
        let inputs = || {
            let x = x.clone().swap_dims(0, 1).narrow(2, 2, 8);
            (x, residual.clone(), gamma.clone().expand([8]))
        };
        let join = |(y, sum)| Tensor::cat(vec![y, sum], 0);
        let fast = |(x, residual, gamma)| join(rms_norm_add::<3>(x, residual, gamma, 1e-5));
        let slow = |(x, residual, gamma)| {
            join(crate::norms::reference::rms_norm::rms_norm_add::<3>(
                x, residual, gamma, 1e-5,
            ))
        };
        assert_same_function!(3e-6, [x, residual, gamma], fast(inputs()), slow(inputs()));
    }

    #[test]
    fn norms_of_no_rows_are_none_and_gamma_has_a_gradient_of_0() {
        let x = normal([0, 3, 4]);
        let gamma = normal([4]);
        let y = rms_norm(x.clone(), gamma.clone(), 1e-5);
        let grads = y.clone().sum().backward();
        assert_eq!(
            (y.dims(), x.grad(&grads).unwrap().dims()),
            ([0, 3, 4], [0, 3, 4])
        );
        assert_eq!(values(gamma.grad(&grads).unwrap()), [0.0; 4]);
    }

    #[test]
    fn an_input_that_needs_no_gradient_gets_none() {
        let x = constant([4, 6]);
        let gamma = normal([6]);
        let grads = rms_norm(x.clone(), gamma.clone(), 1e-5).sum().backward();
        assert!(x.grad(&grads).is_none() && gamma.grad(&grads).is_some());
    }

    #[rstest]
    #[case::length(|| drop(rms_norm(normal([2, 4]), normal([5]), 1e-5)), "gamma has 5 elements, but rows have 4")]
    #[case::no_columns(|| drop(rms_norm(normal([2, 0]), normal([0]), 1e-5)), "x is [2, 0], its rows are empty")]
    #[case::dtype(|| drop(rms_norm(quantized([2, 4]), normal([4]), 1e-5)), "rms_norm: x is qfloat")]
    #[case::dtype_of_gamma(|| drop(rms_norm(normal([2, 4]), quantized([4]), 1e-5)), "gamma is qfloat")]
    #[case::epsilon(|| drop(rms_norm(normal([2, 4]), normal([4]), -1e-5)), "rms_norm: epsilon -0.00001 is not")]
    #[case::nan(|| drop(rms_norm_add(normal([2, 4]), normal([2, 4]), normal([4]), f64::NAN)), "rms_norm_add: epsilon NaN is not")]
    #[case::residual(|| drop(rms_norm_add(normal([2, 4]), normal([3, 4]), normal([4]), 1e-5)), "the shapes or dtypes of x and the residual differ")]
    #[case::dtype_of_residual(
        || drop(rms_norm_add(normal([2, 4]), normal([2, 4]).cast(DType::F64), normal([4]), 1e-5)),
        "rms_norm_add: the shapes or dtypes of x and the residual differ"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }

    #[rstest]
    fn what_is_computed_again_has_the_same_bits(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    ) {
        let [x, residual] = [(); 2].map(|()| leaf(normal(shape).cast(dtype)));
        let gamma = leaf(normal([shape[2]]).cast(dtype));
        let again = |x: Tensor<3>| rms_norm(x.inner(), gamma.clone().inner(), 1e-5);
        assert_same_bits(
            rms_norm(x.clone(), gamma.clone(), 1e-5).inner(),
            again(x.clone()),
        );
        let (y, sum) = rms_norm_add(x, residual, gamma.clone(), 1e-5);
        assert_same_bits(y.inner(), again(sum));
    }
}

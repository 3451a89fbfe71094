//! Layer normalization (Ba, Kiros and Hinton, 2016, arXiv:1607.06450).

use burn::tensor::Tensor;

use super::check;
use super::op::{NormCall, norm, norm_add};
use super::options::NormOptions;

/// `(x - mean(x)) / sqrt(var(x) + epsilon) * gamma [+ beta]` over the last dimension, with the
/// biased variance.
///
/// Statistics and product are computed in f32; the result has the dtype of `x`. On a CPU the result
/// equals `burn::nn::LayerNorm` bit for bit on f32 and f16 tensors, if both run with or both
/// without autodiff. (Burn's own bits differ between the two: without autodiff its backend runs a
/// fused loop.) The backward pass is handwritten; it saves `x`, `gamma`, the row means and the row
/// deviations (on a GPU their inverses).
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `gamma`, `beta`: `[n]`
///
/// # Panics
/// If `gamma` or `beta` is not as long as the last dimension of `x`, that is empty, or epsilon is
/// negative or not finite.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    layer_norm_with(x, gamma, beta, NormOptions::new(epsilon))
}

/// [`layer_norm`] with options.
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `gamma`, `beta`: `[n]`
///
/// # Panics
/// As [`layer_norm`].
pub fn layer_norm_with<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    normed(x, gamma, beta, NormCall::layer(options))
}

/// [`layer_norm`] with the bits that it has under autodiff, on any device; for recomputation in a
/// backward pass.
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `gamma`, `beta`: `[n]`
///
/// # Panics
/// As [`layer_norm`].
pub fn layer_norm_recompute<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    options: impl Into<NormOptions>,
) -> Tensor<D> {
    normed(
        x,
        gamma,
        beta,
        NormCall::layer(options).bit_exact_with_training(),
    )
}

fn normed<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    call: NormCall,
) -> Tensor<D> {
    check("layer_norm", &x, &gamma, beta.as_ref(), &call);
    norm(x, gamma, beta, call)
}

/// Returns the [`layer_norm`] of `x + residual`, and the sum itself in the dtype of `x`.
///
/// On a GPU this is one pass over memory, with one backward kernel for both gradients. The norm is
/// computed from the returned, rounded sum, so [`layer_norm_recompute`] of that sum has the same
/// bits if the rows of `x` and `residual` are contiguous.
///
/// # Shapes
/// - `x`, `residual`, results: `[.., n]`
/// - `gamma`, `beta`: `[n]`
///
/// # Panics
/// As [`layer_norm`], or if `x` and `residual` differ in shape or dtype.
pub fn layer_norm_add<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    options: impl Into<NormOptions>,
) -> (Tensor<D>, Tensor<D>) {
    let call = NormCall::layer(options);
    check("layer_norm_add", &x, &gamma, beta.as_ref(), &call);
    norm_add("layer_norm_add", [x, residual], gamma, beta, call)
}

#[cfg(test)]
mod tests {
    use burn::nn::LayerNormConfig;
    use burn::tensor::{DType, Device, Gradients};
    use megaburn_autograd::MainGrad;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, constant, device,
        leaf, normal, normal_on, quantized, values,
    };
    use rstest::rstest;

    use super::*;
    use crate::NormGrads;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values(1e-5, 0.3)] epsilon: f64,
    ) {
        let n = shape[2];
        let x = normal(shape);
        let gamma = normal([n]);
        let beta = normal([n]);
        assert_same_function!(
            3e-6,
            [x, gamma, beta],
            layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), epsilon),
            crate::norms::reference::layer_norm::layer_norm(
                x.clone(),
                gamma.clone(),
                Some(beta.clone()),
                epsilon
            )
        );
        assert_same_function!(
            3e-6,
            [x, gamma],
            layer_norm(x.clone(), gamma.clone(), None, epsilon),
            crate::norms::reference::layer_norm::layer_norm(
                x.clone(),
                gamma.clone(),
                None,
                epsilon
            )
        );
    }

    #[rstest]
    fn results_are_bit_for_bit_those_of_burn(
        #[values([4, 2, 64], [3, 5, 7])] shape: [usize; 3],
        #[values(true, false)] bias: bool,
        #[values(DType::F32, DType::F16)] dtype: DType,
    ) {
        for device in [Device::flex(), device()] {
            let n = shape[2];
            let vector = || normal_on([n], &device).cast(dtype);
            let config = LayerNormConfig::new(n).with_epsilon(1e-6).with_bias(bias);
            let mut norm = config.init(&device);
            norm.gamma = norm.gamma.map(|_| vector());
            norm.beta = norm.beta.map(|beta| beta.map(|_| vector()));
            let x = normal_on(shape, &device).cast(dtype);
            let beta = norm.beta.as_ref().map(|b| b.val());
            let fast = layer_norm(x.clone(), norm.gamma.val(), beta, 1e-6);
            assert_same_bits(fast, norm.forward(x));
        }
    }

    #[rstest]
    #[case(DType::F16, 2e-3)]
    #[case(DType::BF16, 1e-2)]
    fn half_precision_keeps_f32_statistics(#[case] dtype: DType, #[case] tolerance: f64) {
        let x = leaf((normal([3, 1, 200]) * 300.0).cast(dtype));
        let gamma = leaf(normal([200]).cast(dtype));
        let wide = |t: Tensor<3>| t.cast(DType::F32);
        let exact = layer_norm(wide(x.clone()), gamma.clone().cast(DType::F32), None, 1e-5);
        for y in [
            layer_norm(x.clone(), gamma.clone(), None, 1e-5).inner(),
            layer_norm(x.clone().inner(), gamma.clone().inner(), None, 1e-5),
        ] {
            assert_eq!(y.dtype(), dtype);
            assert_close(wide(y), exact.clone().inner(), tolerance);
        }
        assert_same_function!(
            tolerance,
            [x, gamma],
            layer_norm(x.clone(), gamma.clone(), None, 1e-5),
            crate::norms::reference::layer_norm::layer_norm(x.clone(), gamma.clone(), None, 1e-5)
        );
    }

    #[rstest]
    fn options_and_residual_sums_are_those_of_the_reference(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values((DType::F32, 3e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let [x, residual] = [0, 1].map(|_| leaf(normal(shape).cast(dtype)));
        let [gamma, beta] = [0, 1].map(|_| normal([shape[2]]));
        let options = NormOptions::new(1e-3).with_zero_centered_gamma(true);
        assert_same_function!(
            tolerance,
            [x, gamma],
            layer_norm_with(x.clone(), gamma.clone(), None, options.clone()),
            crate::norms::reference::layer_norm::layer_norm_with(
                x.clone(),
                gamma.clone(),
                None,
                options.clone()
            )
        );
        let join = |(y, sum)| Tensor::cat(vec![y, sum], 0);
        let inputs = || {
            (
                x.clone(),
                residual.clone(),
                gamma.clone(),
                Some(beta.clone()),
            )
        };
        let fast =
            |(x, residual, gamma, beta)| layer_norm_add(x, residual, gamma, beta, options.clone());
        let slow = |(x, residual, gamma, beta)| {
            crate::norms::reference::layer_norm::layer_norm_add(
                x,
                residual,
                gamma,
                beta,
                options.clone(),
            )
        };
        assert_same_function!(
            tolerance,
            [x, residual, gamma, beta],
            join(fast(inputs())),
            join(slow(inputs()))
        );
    }

    #[rstest]
    fn attached_main_grads_take_the_gradients_sums(
        #[values((true, true), (true, false), (false, true))] (of_gamma, of_beta): (bool, bool),
        #[values(true, false)] with_residual: bool,
    ) {
        let gamma = normal([7]);
        let beta = normal([7]);
        let grad = |is_some: bool| is_some.then(MainGrad::default);
        let main_grads = NormGrads {
            gamma: grad(of_gamma),
            beta: grad(of_beta),
        };
        [&main_grads.gamma, &main_grads.beta]
            .into_iter()
            .flatten()
            .for_each(MainGrad::attach);
        let mut expected = [0; 2].map(|_| vec![0.0; 7]);
        let mut found = expected.clone();
        for _ in 0..3 {
            let x = normal([4, 7]);
            let residual = normal([4, 7]);
            let weight = constant([4, 7]);
            let loss = |main_grads: NormGrads| {
                let options = NormOptions::new(1e-5).with_main_grads(main_grads);
                let x = x.clone();
                let gamma = gamma.clone();
                let beta = Some(beta.clone());
                let y = if with_residual {
                    layer_norm_add(x, residual.clone(), gamma, beta, options).0
                } else {
                    layer_norm_with(x, gamma, beta, options)
                };
                (y * weight.clone()).sum().backward()
            };
            let add = |sums: &mut [Vec<f64>; 2], grads: &Gradients| {
                for (sum, vector) in sums.iter_mut().zip([&gamma, &beta]) {
                    let Some(grad) = vector.grad(grads) else {
                        continue;
                    };
                    sum.iter_mut()
                        .zip(values(grad))
                        .for_each(|(sum, grad)| *sum += grad);
                }
            };
            add(&mut expected, &loss(NormGrads::default()));
            let grads = loss(main_grads.clone());
            assert_eq!(gamma.grad(&grads).is_some(), !of_gamma);
            assert_eq!(beta.grad(&grads).is_some(), !of_beta);
            add(&mut found, &grads);
        }
        for (found, main_grad) in found.iter_mut().zip([&main_grads.gamma, &main_grads.beta]) {
            if let Some(main_grad) = main_grad {
                *found = values(main_grad.take().expect("three gradients"));
            }
        }
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
        }
    }

    #[test]
    fn views_are_normed_as_their_copies() {
        let x = normal([3, 5, 12]);
        let vectors = normal([8, 2]);
        let inputs = || {
            let x = x.clone().swap_dims(0, 1).narrow(2, 2, 8);
            let [gamma, beta] = [0, 1].map(|i| vectors.clone().narrow(1, i, 1).squeeze_dim(1));
            (x, gamma, Some(beta))
        };
        let fast = |(x, gamma, beta)| layer_norm::<3>(x, gamma, beta, 1e-5);
        let slow = |(x, gamma, beta)| {
            crate::norms::reference::layer_norm::layer_norm::<3>(x, gamma, beta, 1e-5)
        };
        assert_same_function!(3e-6, [x, vectors], fast(inputs()), slow(inputs()));
    }

    #[test]
    fn norms_of_no_rows_are_none_and_vectors_have_gradients_of_0() {
        let x = normal([0, 3, 4]);
        let gamma = normal([4]);
        let beta = normal([4]);
        let y = layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5);
        let grads = y.clone().sum().backward();
        assert_eq!(
            (y.dims(), x.grad(&grads).unwrap().dims()),
            ([0, 3, 4], [0, 3, 4])
        );
        for vector in [gamma, beta] {
            assert_eq!(values(vector.grad(&grads).unwrap()), [0.0; 4]);
        }
    }

    #[rstest]
    #[case::gamma(|| drop(layer_norm(normal([2, 4]), normal([3]), None, 1e-5)), "layer_norm: gamma has 3 elements, but rows have 4")]
    #[case::beta(|| drop(layer_norm(normal([2, 4]), normal([4]), Some(normal([5])), 1e-5)), "beta has 5 elements, but rows have 4")]
    #[case::no_columns(|| drop(layer_norm(normal([2, 0]), normal([0]), None, 1e-5)), "x is [2, 0], its rows are empty")]
    #[case::dtype(|| drop(layer_norm(quantized([2, 4]), normal([4]), None, 1e-5)), "layer_norm: x is qfloat")]
    #[case::dtype_of_beta(|| drop(layer_norm(normal([2, 4]), normal([4]), Some(quantized([4])), 1e-5)), "beta is qfloat")]
    #[case::epsilon(|| drop(layer_norm(normal([2, 4]), normal([4]), None, f64::INFINITY)), "epsilon inf is not")]
    #[case::residual(|| drop(layer_norm_add(normal([2, 4]), normal([4, 2]), normal([4]), None, 1e-5)), "layer_norm_add: the shapes or dtypes of x and the residual differ")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }

    /// Recomputes, without autodiff, what was normalized under autodiff.
    #[rstest]
    fn what_is_computed_again_has_the_same_bits(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
        #[values(true, false)] with_beta: bool,
        #[values(0.0, 1e3)] mean: f64,
    ) {
        let n = shape[2];
        let tensor = || leaf((normal(shape) + mean).cast(dtype));
        let [gamma, beta] = [(); 2].map(|()| leaf(normal([n]).cast(dtype)));
        let beta = with_beta.then_some(beta);
        let inner = || (gamma.clone().inner(), beta.clone().map(Tensor::inner));
        let again = |x: Tensor<3>| {
            let (gamma, beta) = inner();
            layer_norm_recompute(x.inner(), gamma, beta, 1e-5)
        };
        let x = tensor();
        let residual = tensor();
        let y = layer_norm(x.clone(), gamma.clone(), beta.clone(), 1e-5);
        assert_same_bits(y.inner(), again(x.clone()));
        let (y, sum) = layer_norm_add(x, residual, gamma.clone(), beta.clone(), 1e-5);
        assert_same_bits(y.inner(), again(sum));
    }
}

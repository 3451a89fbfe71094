//! Layer normalisation (Ba, Kiros and Hinton, 2016, arXiv:1607.06450).

mod op;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use op::LayerNormOps;

/// `(x - mean(x)) / sqrt(var(x) + epsilon) * gamma [+ beta]` over the last dimension, with the
/// biased variance.
///
/// Statistics and product in f32, result in the dtype of `x`. The result equals
/// `burn::nn::LayerNorm` bit for bit on f32 and f16 tensors of the same kind of device. (Burn's
/// own bits differ between the two kinds: without autodiff its backend runs a fused loop.) The
/// backward is written by hand and keeps the normalised input, the deviations and `gamma` alive.
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `gamma`, `beta`: `[n]`
///
/// # Panics
/// If `gamma` or `beta` is not as long as the last dimension of `x`.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    let n = x.dims()[D - 1];
    for (name, [length]) in
        [("gamma", gamma.dims())].into_iter().chain(beta.as_ref().map(|b| ("beta", b.dims())))
    {
        assert_eq!(n, length, "layer_norm: {name} has {length} elements for rows of {n}");
    }
    let (x, gamma) = (x.into_dispatch(), gamma.into_dispatch());
    Tensor::from_dispatch(match beta {
        Some(beta) => Dispatch::affine_norm(x, gamma, beta.into_dispatch(), epsilon),
        None => Dispatch::scaled_norm(x, gamma, epsilon),
    })
}

#[cfg(test)]
mod tests {
    use burn::nn::LayerNormConfig;
    use burn::tensor::{DType, Device};
    use rstest::rstest;

    use super::*;
    use crate::testing::{
        assert_close, assert_same_bits, assert_same_function, device, leaf, normal, normal_on,
    };

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([5, 3, 8], [7, 1, 33])] shape: [usize; 3],
        #[values(1e-5, 0.3)] epsilon: f64,
    ) {
        let n = shape[2];
        let (x, gamma, beta) = (normal(shape), normal([n]), normal([n]));
        assert_same_function!(
            3e-6,
            [x, gamma, beta],
            layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), epsilon),
            reference::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), epsilon)
        );
        assert_same_function!(
            3e-6,
            [x, gamma],
            layer_norm(x.clone(), gamma.clone(), None, epsilon),
            reference::layer_norm(x.clone(), gamma.clone(), None, epsilon)
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
            reference::layer_norm(x.clone(), gamma.clone(), None, 1e-5)
        );
    }

    #[test]
    #[should_panic(expected = "beta has 5 elements for rows of 4")]
    fn a_beta_of_another_length_is_refused() {
        layer_norm(normal([2, 4]), normal([4]), Some(normal([5])), 1e-5);
    }
}

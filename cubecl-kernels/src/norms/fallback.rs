//! Fallback for norms, composed of a backend's primitives.
//!
//! With `n = (x - mean) / std` (no mean in RMS norm) and `g = dy * gamma`:
//! `dbeta = sum_rows(dy)`, `dgamma = sum_rows(dy * n)`,
//! `dx = (g - mean(g) - n * mean(g * n)) / std`.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::FloatDType;
use megaburn_autograd::backend_ops::{cast, compute_dtype, row, rows};
use megaburn_autograd::on_composed_backends;

use super::op::{Norm, NormInput, NormInputGrads, NormRows, Normed, SavedNorm};
use super::options::NormGrads;
use crate::bias::bias_gradient;

on_composed_backends! {
    impl NormRows {
        fn normed(
            norm: Norm,
            input: NormInput<FloatTensor<Self>>,
            finds_amax: bool,
        ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
            normed::<Self>(norm, input, finds_amax)
        }

        fn forward(
            norm: Norm,
            input: NormInput<FloatTensor<Self>>,
            finds_amax: bool,
        ) -> Normed<FloatTensor<Self>> {
            forward::<Self>(norm, input, finds_amax)
        }

        fn backward(
            norm: Norm,
            saved: SavedNorm<FloatTensor<Self>>,
            dy: FloatTensor<Self>,
            dsum: Option<FloatTensor<Self>>,
            sums: &NormGrads,
            finds_amax: bool,
        ) -> NormInputGrads<FloatTensor<Self>> {
            backward::<Self>(norm, saved, dy, dsum, sums, finds_amax)
        }
    }
}

pub(super) fn normed<B: NormRows>(
    norm: Norm,
    input: NormInput<FloatTensor<B>>,
    finds_amax: bool,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    if norm.bit_exact_with_training
        || !norm.centered
        || norm.options.zero_centered_gamma
        || input.residual.is_some()
    {
        let Normed { y, amax, .. } = forward::<B>(norm, input, finds_amax);
        return (y, amax);
    }
    // Use the backend's own loop, the one that `burn::nn::LayerNorm` runs.
    let NormInput { x, gamma, beta, .. } = input;
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let [x, gamma] = [x, gamma].map(|t| cast::<B>(t, wide));
    let beta = beta.map(|beta| cast::<B>(beta, wide));
    let y = B::layer_norm(x, gamma, beta, norm.options.epsilon);
    let y = cast::<B>(y, dtype.into());
    let amax = finds_amax.then(|| B::largest_magnitude(y.clone()));
    (y, amax)
}

/// Computes the norm in the same order of operations as Burn's composed norm, for equal bits.
pub(super) fn forward<B: NormRows>(
    norm: Norm,
    input: NormInput<FloatTensor<B>>,
    finds_amax: bool,
) -> Normed<FloatTensor<B>> {
    let NormInput {
        x,
        residual,
        gamma,
        beta,
    } = input;
    let (shape, dtype, wide) = (x.shape(), x.dtype(), compute_dtype(x.dtype()));
    let sum = match residual {
        Some(residual) => {
            let sum = B::float_add(cast::<B>(x, wide), cast::<B>(residual, wide));
            cast::<B>(sum, dtype.into())
        }
        None => x,
    };
    let x = cast::<B>(rows::<B>(sum.clone()), wide);
    let mean = norm.centered.then(|| B::float_mean_dim(x.clone(), 1));
    let centered = less::<B>(x, mean.clone());
    let squares = B::float_mean_dim(B::float_mul(centered.clone(), centered.clone()), 1);
    let std = B::float_sqrt(B::float_add_scalar(squares, norm.options.epsilon.into()));
    let n = B::float_div(centered, std.clone());
    let y = B::float_mul(n, scale::<B>(norm, gamma.clone(), wide));
    let types = beta.as_ref().map(|beta| beta.dtype());
    let y = match beta {
        Some(beta) => B::float_add(y, row::<B>(beta, wide)),
        None => y,
    };
    let y = B::float_reshape(cast::<B>(y, dtype.into()), shape);
    let saved = SavedNorm {
        x: sum.clone(),
        mean,
        std_or_rstd: std,
        gamma,
        beta: types,
        dtype,
    };
    Normed {
        amax: finds_amax.then(|| B::largest_magnitude(y.clone())),
        y,
        sum,
        saved,
    }
}

/// Subtracts the means of rows, if there are any.
fn less<B: Backend>(x: FloatTensor<B>, mean: Option<FloatTensor<B>>) -> FloatTensor<B> {
    match mean {
        Some(mean) => B::float_sub(x, mean),
        None => x,
    }
}

/// The factor of normalized rows, `[1, n]`.
fn scale<B: Backend>(norm: Norm, gamma: FloatTensor<B>, wide: FloatDType) -> FloatTensor<B> {
    let gamma = row::<B>(gamma, wide);
    if norm.options.zero_centered_gamma {
        B::float_add_scalar(gamma, 1.0.into())
    } else {
        gamma
    }
}

pub(super) fn backward<B: NormRows>(
    norm: Norm,
    saved: SavedNorm<FloatTensor<B>>,
    dy: FloatTensor<B>,
    dsum: Option<FloatTensor<B>>,
    sums: &NormGrads,
    finds_amax: bool,
) -> NormInputGrads<FloatTensor<B>> {
    let SavedNorm {
        x,
        mean,
        std_or_rstd: std,
        gamma,
        beta,
        dtype,
    } = saved;
    let shape = dy.shape();
    let wide = compute_dtype(dtype);
    // Recompute exactly the numbers of the forward pass.
    let n = B::float_div(less::<B>(cast::<B>(rows::<B>(x), wide), mean), std.clone());
    let dy = cast::<B>(rows::<B>(dy), wide);
    let dy_n = B::float_mul(n.clone(), dy.clone());
    let dbeta = beta.and_then(|dtype| bias_gradient::<B>(dy.clone(), dtype, sums.beta.as_ref()));
    let dgamma = bias_gradient::<B>(dy_n.clone(), gamma.dtype(), sums.gamma.as_ref());
    let gamma = scale::<B>(norm, gamma, wide);
    let mean_gn = B::float_mean_dim(B::float_mul(dy_n, gamma.clone()), 1);
    let mut g = B::float_mul(dy, gamma);
    if norm.centered {
        g = B::float_sub(g.clone(), B::float_mean_dim(g, 1));
    }
    let mut dx = B::float_div(B::float_sub(g, B::float_mul(n, mean_gn)), std);
    if let Some(dsum) = dsum {
        dx = B::float_add(dx, cast::<B>(rows::<B>(dsum), wide));
    }
    let dx = B::float_reshape(cast::<B>(dx, dtype.into()), shape);
    NormInputGrads {
        amax: finds_amax.then(|| B::largest_magnitude(dx.clone())),
        x: dx,
        gamma: dgamma,
        beta: dbeta,
    }
}

use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

use crate::norms::options::NormOptions;

/// [`layer_norm`](crate::layer_norm) by its definition.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    layer_norm_with(x, gamma, beta, NormOptions::new(epsilon))
}

/// [`layer_norm_with`](crate::layer_norm_with) by its definition.
pub fn layer_norm_with<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let x = x.cast(wide);
    let centered = x.clone() - x.mean_dim(D - 1);
    let variance = (centered.clone() * centered.clone()).mean_dim(D - 1);
    let gamma = gamma.cast(wide)
        + if options.zero_centered_gamma {
            1.0
        } else {
            0.0
        };
    let y = centered / (variance + options.epsilon).sqrt() * gamma.unsqueeze();
    match beta {
        Some(beta) => y + beta.cast(wide).unsqueeze(),
        None => y,
    }
    .cast(dtype)
}

/// [`layer_norm_add`](crate::layer_norm_add) by its definition.
pub fn layer_norm_add<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    options: impl Into<NormOptions>,
) -> (Tensor<D>, Tensor<D>) {
    let sum = x + residual;
    (
        layer_norm_with(sum.clone(), gamma, beta, options.into()),
        sum,
    )
}

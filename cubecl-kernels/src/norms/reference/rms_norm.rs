use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

use crate::norms::options::NormOptions;

/// [`rms_norm`](crate::rms_norm) by its definition.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    rms_norm_with(x, gamma, NormOptions::new(epsilon))
}

/// [`rms_norm_with`](crate::rms_norm_with) by its definition.
pub fn rms_norm_with<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    options: NormOptions,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let x = x.cast(wide);
    let rms = ((x.clone() * x.clone()).mean_dim(D - 1) + options.epsilon).sqrt();
    let gamma = gamma.cast(wide)
        + if options.zero_centered_gamma {
            1.0
        } else {
            0.0
        };
    (x / rms * gamma.unsqueeze()).cast(dtype)
}

/// [`rms_norm_add`](crate::rms_norm_add) by its definition.
pub fn rms_norm_add<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    options: impl Into<NormOptions>,
) -> (Tensor<D>, Tensor<D>) {
    let sum = x + residual;
    (rms_norm_with(sum.clone(), gamma, options.into()), sum)
}

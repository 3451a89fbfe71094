use burn::tensor::Tensor;

use crate::primitive::compute_dtype;

/// [`layer_norm`](crate::layer_norm) by its definition.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let x = x.cast(wide);
    let centered = x.clone() - x.mean_dim(D - 1);
    let variance = (centered.clone() * centered.clone()).mean_dim(D - 1);
    let y = centered / (variance + epsilon).sqrt() * gamma.cast(wide).unsqueeze();
    match beta {
        Some(beta) => y + beta.cast(wide).unsqueeze(),
        None => y,
    }
    .cast(dtype)
}

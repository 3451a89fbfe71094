use burn::tensor::Tensor;

use crate::primitive::compute_dtype;

/// [`rms_norm`](crate::rms_norm) by its definition.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let x = x.cast(wide);
    let rms = ((x.clone() * x.clone()).mean_dim(D - 1) + epsilon).sqrt();
    (x / rms * gamma.cast(wide).unsqueeze()).cast(dtype)
}

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

/// [`gelu`](crate::gelu) by its definition.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let (dtype, x) = (x.dtype(), x.clone().cast(compute_dtype(x.dtype())));
    ((x.clone() * FRAC_1_SQRT_2).erf().add_scalar(1.0) * x * 0.5).cast(dtype)
}

/// [`gelu_tanh`](crate::gelu_tanh) by its definition.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let (dtype, x) = (x.dtype(), x.clone().cast(compute_dtype(x.dtype())));
    let cubic = x.clone() + x.clone() * x.clone() * x.clone() * 0.044715;
    ((cubic * (2.0 / PI).sqrt()).tanh().add_scalar(1.0) * x * 0.5).cast(dtype)
}

/// [`bias_gelu`](crate::bias_gelu) by its definition.
pub fn bias_gelu<const D: usize>(x: Tensor<D>, bias: Tensor<1>) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    gelu(x.cast(wide) + bias.cast(wide).unsqueeze()).cast(dtype)
}

/// [`bias_gelu_tanh`](crate::bias_gelu_tanh) by its definition.
pub fn bias_gelu_tanh<const D: usize>(x: Tensor<D>, bias: Tensor<1>) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    gelu_tanh(x.cast(wide) + bias.cast(wide).unsqueeze()).cast(dtype)
}

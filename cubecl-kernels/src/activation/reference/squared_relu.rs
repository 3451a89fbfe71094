use burn::tensor::{Tensor, activation::relu};
use megaburn_autograd::backend_ops::{compute_dtype, weigh};

/// [`squared_relu`](crate::squared_relu) by its definition.
pub fn squared_relu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    relu(x.cast(compute_dtype(dtype))).square().cast(dtype)
}

/// [`squared_relu_weighted`](crate::squared_relu_weighted) by its definition.
pub fn squared_relu_weighted<const D: usize>(x: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    weigh(x, weight, squared_relu)
}

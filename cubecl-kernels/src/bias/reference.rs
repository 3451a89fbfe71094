use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

/// [`add_bias`](crate::add_bias) by its definition.
pub fn add_bias<const D: usize>(x: Tensor<D>, bias: Tensor<1>) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    (x.cast(wide) + bias.cast(wide).unsqueeze()).cast(dtype)
}

/// [`add_positions`](crate::add_positions) by its definition.
pub fn add_positions(x: Tensor<3>, positions: Tensor<3>) -> Tensor<3> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    (x.cast(wide) + positions.cast(wide)).cast(dtype)
}

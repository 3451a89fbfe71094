use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

/// [`sum_all`](crate::sum_all) by its definition.
pub fn sum_all<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let dtype = x.dtype();
    x.cast(compute_dtype(dtype)).sum().cast(dtype)
}

/// [`sum_columns`](crate::sum_columns) by its definition.
pub fn sum_columns(x: Tensor<2>) -> Tensor<2> {
    let dtype = x.dtype();
    x.cast(compute_dtype(dtype)).sum_dim(0).cast(dtype)
}

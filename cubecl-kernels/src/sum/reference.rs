use burn::tensor::Tensor;

use crate::primitive::compute_dtype;

/// [`sum_all`](crate::sum_all) by its definition.
pub fn sum_all<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let dtype = x.dtype();
    x.cast(compute_dtype(dtype)).sum().cast(dtype)
}

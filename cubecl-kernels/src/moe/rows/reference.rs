//! Permute and unpermute by their definitions.

use burn::tensor::{DType, Int, Tensor};
use megaburn_autograd::backend_ops::compute_dtype;

pub(super) fn permute(x: Tensor<2>, index: Tensor<1, Int>) -> Tensor<2> {
    x.select(0, index)
}

pub(super) fn unpermute(y: Tensor<2>, index: Tensor<2, Int>) -> Tensor<2> {
    let [_, n] = y.dims();
    let [t, k] = index.dims();
    let dtype = y.dtype();
    let none = Tensor::zeros([1, n], (&y.device(), dtype));
    let terms = Tensor::cat(vec![y, none], 0).select(0, index.reshape([t * k]));
    if k == 1 {
        return terms;
    }
    let wide: DType = compute_dtype(dtype).into();
    terms
        .reshape([t, k, n])
        .cast(wide)
        .sum_dim(1)
        .reshape([t, n])
        .cast(dtype)
}

//! The soft cap of logits, composed of tensor operations: `cap * tanh(logit / cap)`.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

/// The capped logits in the compute dtype.
pub(super) fn capped(logits: Tensor<3>, cap: f64) -> Tensor<3> {
    let wide = compute_dtype(logits.dtype());
    (logits.cast(wide) / cap).tanh() * cap
}

/// [`capped`] in the dtype of `logits`, of a backend's own tensor.
pub(super) fn capped_of<B: Backend>(logits: FloatTensor<B>, cap: f64) -> FloatTensor<B> {
    let share = B::float_tanh(B::float_div_scalar(logits, cap.into()));
    B::float_mul_scalar(share, cap.into())
}

/// The gradient of the logits, given that of the `capped` logits: times `1 - (capped / cap)^2`.
pub(super) fn gradient<B: Backend>(
    capped: FloatTensor<B>,
    grad: FloatTensor<B>,
    cap: f64,
) -> FloatTensor<B> {
    let share = B::float_div_scalar(capped, cap.into());
    let flat = B::float_mul(B::float_mul(share.clone(), share), grad.clone());
    B::float_sub(grad, flat)
}

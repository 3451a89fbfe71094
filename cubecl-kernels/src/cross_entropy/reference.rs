use burn::tensor::{Int, Tensor, activation};
use megaburn_autograd::backend_ops::compute_dtype;

use super::options::CrossEntropyOptions;

/// [`cross_entropy`](crate::cross_entropy) of unsharded logits, by its definition.
pub fn cross_entropy(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    options: CrossEntropyOptions,
) -> Tensor<2> {
    let [s, b, _] = logits.dims();
    let wide = compute_dtype(logits.dtype());
    let logits = logits.cast(wide).narrow(2, 0, options.vocab);
    let logits = match options.soft_cap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits,
    };
    let log_p = activation::log_softmax(logits.clone(), 2);
    let log_sum = logits.narrow(2, 0, 1) - log_p.clone().narrow(2, 0, 1);
    let ignored = labels.clone().equal_elem(options.ignore_index);
    let index = labels.mask_fill(ignored.clone(), 0).reshape([s, b, 1]);
    let (index, ignored) = if log_p.device().is_autodiff() {
        (Tensor::from_inner(index), Tensor::from_inner(ignored))
    } else {
        (index, ignored)
    };
    let target = log_p.clone().gather(2, index) * options.on_target();
    let z_loss = log_sum.clone() * log_sum * options.z_loss;
    let loss = -target - log_p.sum_dim(2) * options.on_each() + z_loss;
    loss.reshape([s, b]).mask_fill(ignored, 0.0)
}

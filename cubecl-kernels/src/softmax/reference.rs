use burn::tensor::{Bool, Tensor, activation};
use megaburn_autograd::backend_ops::compute_dtype;

use super::options::SoftmaxMask;

/// [`scale_mask_softmax`](crate::scale_mask_softmax) by its definition.
pub fn scale_mask_softmax(scores: Tensor<4>, mask: SoftmaxMask, scale: f64) -> Tensor<4> {
    let (dtype, wide) = (scores.dtype(), compute_dtype(scores.dtype()));
    let scores = scores.cast(wide) * scale;
    let mask = match mask {
        SoftmaxMask::None => return activation::softmax(scores, 3).cast(dtype),
        SoftmaxMask::Causal => {
            let [_, _, s_q, s_k] = scores.dims();
            Tensor::<2, Bool>::tril_mask([s_q, s_k], 0, &scores.device().inner()).unsqueeze()
        }
        SoftmaxMask::Masked(mask) => mask,
    };
    // A finite substitute for minus infinity keeps rows without any visible key free of NaN, also
    // in the gradient. The second fill makes these rows, and every masked key, exactly 0.
    let mask = mask.expand(scores.dims());
    let mask = if scores.device().is_autodiff() {
        Tensor::from_inner(mask)
    } else {
        mask
    };
    let probabilities = activation::softmax(scores.mask_fill(mask.clone(), -1e30), 3);
    probabilities.mask_fill(mask, 0.0).cast(dtype)
}

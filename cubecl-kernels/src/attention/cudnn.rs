//! Attention through cuDNN, where that is chosen and can: whole or causal from the first key.

use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::cudnn;

use super::AttentionOptions;
use super::flash::readable;
use super::kernel::{self, AttentionKernel};

/// What is saved for the gradients, its inputs first: `q`, `k`, `v`, the result `[s_q, b, hq, d_v]`
/// and the logarithms of the sums, `[b, hq, s_q]` in f32. Nothing where cuDNN does not serve.
pub(super) fn forward(
    inputs: &[CubeTensor; 3],
    options: &AttentionOptions,
) -> Option<[CubeTensor; 5]> {
    let (causal, scale) = asked(&inputs[0], options)?;
    let [q, k, v] = inputs.clone().map(readable);
    let [out, lse] = cudnn::forward([&q, &k, &v], causal, scale).ok()?;
    Some([q, k, v, out, lse])
}

/// The gradients of `q`, `k` and `v`; nothing where cuDNN did not serve.
pub(super) fn backward(
    inputs: [&CubeTensor; 3],
    [out, lse]: [&CubeTensor; 2],
    dout: &CubeTensor,
    options: &AttentionOptions,
) -> Option<[CubeTensor; 3]> {
    let (causal, scale) = asked(inputs[0], options)?;
    cudnn::backward(inputs, out, lse, dout.clone(), causal, scale).ok()
}

/// Whether cuDNN is to mask, and the factor of scores, if it is chosen and these options are its own.
fn asked(q: &CubeTensor, options: &AttentionOptions) -> Option<(bool, f32)> {
    let AttentionOptions {
        scale: _,
        causal,
        query_offset,
        window: None,
        soft_cap: None,
        sequences: None,
        dropout: None,
    } = *options
    else {
        return None;
    };
    let from_the_first = !causal || query_offset == 0;
    let chosen = kernel::chosen() == AttentionKernel::Cudnn && from_the_first;
    let d = *q.meta.shape().as_slice().last()?;
    let scale = options.factor(d) as f32;
    (chosen && scale.is_normal() && scale > 0.0).then_some((causal, scale))
}

//! Attention through cuDNN, where that is chosen and can: whole or causal from the first key.

use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::cudnn;

use super::AttentionOptions;
use super::flash::readable;
use super::kernel::{self, AUTO_LEN, AttentionKernel};

/// What is saved for the gradients, its inputs first: `q`, `k`, `v`, the result `[s_q, b, hq, d_v]`
/// and the logarithms of the sums, `[b, hq, s_q]` in f32. Nothing where cuDNN does not serve.
pub(super) fn forward(
    inputs: &[CubeTensor; 3],
    options: &AttentionOptions,
) -> Option<[CubeTensor; 5]> {
    let (causal, scale) = asked([&inputs[0], &inputs[1]], options)?;
    let [q, k, v] = inputs.clone().map(readable);
    if !may_ask([&q, &k, &v], causal) {
        return None;
    }
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
    let (causal, scale) = asked([inputs[0], inputs[1]], options)?;
    if !may_ask(inputs, causal) {
        return None;
    }
    cudnn::backward(inputs, out, lse, dout.clone(), causal, scale).ok()
}

/// Whether cuDNN is to mask, and the factor of scores, if it is chosen and these options are its own. The log
/// says once for each reason why one that is chosen is not asked.
fn asked([q, k]: [&CubeTensor; 2], options: &AttentionOptions) -> Option<(bool, f32)> {
    let [s_q, _, _, d] = q.meta.shape().dims();
    if !is_chosen([s_q, k.meta.shape()[0]]) {
        return None;
    }
    let scale = options.factor(d) as f32;
    match unserved(options, scale) {
        None => Some((options.causal, scale)),
        Some(why) => {
            cudnn::fallback_reason(why, kernel::chosen() == AttentionKernel::Cudnn);
            None
        }
    }
}

/// What of the options cuDNN is not asked for.
fn unserved(options: &AttentionOptions, scale: f32) -> Option<&'static str> {
    let AttentionOptions {
        scale: _,
        causal,
        query_offset,
        window,
        soft_cap,
        sequences,
        dropout,
    } = options;
    let reasons = [
        (window.is_some(), "a window"),
        (soft_cap.is_some(), "a soft cap of scores"),
        (sequences.is_some(), "packed sequences"),
        (dropout.is_some(), "attention dropout"),
        (
            *causal && *query_offset != 0,
            "queries that stand behind the first key",
        ),
        (
            !(scale.is_normal() && scale > 0.0),
            "a factor of scores that is not positive",
        ),
    ];
    reasons
        .into_iter()
        .find_map(|(is_so, why)| is_so.then_some(why))
}

/// Whether the choice is cuDNN's for these lengths: of itself for sequences as training has them, and
/// for stretches of such.
fn is_chosen([s_q, s_k]: [usize; 2]) -> bool {
    match kernel::chosen() {
        AttentionKernel::Cudnn => true,
        AttentionKernel::Auto => s_q.min(s_k) >= AUTO_LEN && cudnn::is_available(),
        AttentionKernel::Cubecl | AttentionKernel::Reference => false,
    }
}

/// Plans are made for a shape each, which takes a second or two, and kept: who has not asked for cuDNN
/// waits for a few of them alone.
fn may_ask(inputs: [&CubeTensor; 3], causal: bool) -> bool {
    const SHAPES: usize = 64;
    kernel::chosen() == AttentionKernel::Cudnn
        || cudnn::is_known(inputs, causal)
        || cudnn::num_asked() < SHAPES
}

//! Attention through cuDNN, where that is chosen and supported: full, or causal from the first key.

use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::cudnn;

use super::flash::readable;
use crate::attention::options::{AUTO_LEN, AttentionKernel, AttentionOptions};

/// What is saved for backward: `q`, `k`, `v`, the result `[s_q, b, hq, d_v]` and the LSE,
/// `[b, hq, s_q]` in f32. `None` if cuDNN is not used.
pub(in crate::attention) fn forward(
    inputs: &[CubeTensor; 3],
    biased: bool,
    options: &AttentionOptions,
) -> Option<[CubeTensor; 5]> {
    let (causal, scale) = asked([&inputs[0], &inputs[1]], biased, options)?;
    let [q, k, v] = inputs.clone().map(readable);
    if !may_ask(options.kernel, [&q, &k, &v], causal) {
        return None;
    }
    let [out, lse] = cudnn::forward([&q, &k, &v], causal, scale).ok()?;
    Some([q, k, v, out, lse])
}

/// The gradients of `q`, `k` and `v`; `None` if cuDNN is not used.
pub(in crate::attention) fn backward(
    inputs: [&CubeTensor; 3],
    [out, lse]: [&CubeTensor; 2],
    dout: &CubeTensor,
    biased: bool,
    options: &AttentionOptions,
) -> Option<[CubeTensor; 3]> {
    let (causal, scale) = asked([inputs[0], inputs[1]], biased, options)?;
    if !may_ask(options.kernel, inputs, causal) {
        return None;
    }
    cudnn::backward(inputs, out, lse, dout.clone(), causal, scale).ok()
}

/// Whether cuDNN masks causally, and the scale of scores; `None` if cuDNN is not chosen or does not
/// support the options. Each reason for a fallback is logged once.
fn asked(
    [q, k]: [&CubeTensor; 2],
    biased: bool,
    options: &AttentionOptions,
) -> Option<(bool, f32)> {
    let [s_q, _, _, d] = q.meta.shape().dims();
    if !is_chosen(options.kernel, [s_q, k.meta.shape()[0]]) {
        return None;
    }
    let scale = options.factor(d) as f32;
    match unserved(options, biased, scale) {
        None => Some((options.causal, scale)),
        Some(why) => {
            cudnn::fallback_reason(why, options.kernel == AttentionKernel::Cudnn);
            None
        }
    }
}

/// The first option that cuDNN does not support.
fn unserved(options: &AttentionOptions, biased: bool, scale: f32) -> Option<&'static str> {
    let AttentionOptions {
        scale: _,
        causal,
        query_offset,
        window,
        soft_cap,
        sequences,
        dropout,
        kernel: _,
        tiles: _,
    } = options;
    let reasons = [
        (biased, "a bias of scores"),
        (window.is_some(), "a window"),
        (soft_cap.is_some(), "a soft cap on scores"),
        (sequences.is_some(), "packed sequences"),
        (dropout.is_some(), "attention dropout"),
        (*causal && *query_offset != 0, "a query offset"),
        (
            !(scale.is_normal() && scale > 0.0),
            "a softmax scale that is not positive",
        ),
    ];
    reasons
        .into_iter()
        .find_map(|(is_so, why)| is_so.then_some(why))
}

/// Whether cuDNN is chosen for these lengths. `Auto` chooses it for sequences as long as in
/// training, and for chunks of such sequences.
fn is_chosen(kernel: AttentionKernel, [s_q, s_k]: [usize; 2]) -> bool {
    match kernel {
        AttentionKernel::Cudnn => true,
        AttentionKernel::Auto => s_q.min(s_k) >= AUTO_LEN && cudnn::is_available(),
        AttentionKernel::Cubecl | AttentionKernel::Reference => false,
    }
}

/// Whether cuDNN may be asked about these inputs. It builds a plan per shape, which takes a second
/// or two, and caches it. `Auto` limits itself to about `SHAPES` shapes.
fn may_ask(kernel: AttentionKernel, inputs: [&CubeTensor; 3], causal: bool) -> bool {
    const SHAPES: usize = 64;
    kernel == AttentionKernel::Cudnn
        || cudnn::is_known(inputs, causal)
        || cudnn::num_asked() < SHAPES
}

//! Scaled dot-product attention with grouped queries (Ainslie et al., 2023, arXiv:2305.13245).

mod biased;
mod fallback;
mod fused;
#[cfg(feature = "cuda")]
mod kernels;
mod largest_scores;
#[cfg(feature = "cuda")]
mod launch;
mod op;
mod options;
mod partial;
pub(crate) mod reference;
mod scores;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

pub use biased::{biased_attention, biased_partial_attention, biased_partial_attention_gradients};
pub use largest_scores::largest_scores;
use op::Attention;
pub use options::{
    AUTO_LEN, AttentionDropout, AttentionKernel, AttentionOptions, AttentionTiles, PackedSequences,
};
pub use partial::{
    OnlineSoftmaxMerge, PartialAttention, add_rows, partial_attention, partial_attention_gradients,
    sink_gradients,
};

/// `softmax(q k^T * scale, visible keys) v`, where `hq / hkv` adjacent query heads share a key and
/// value head.
///
/// Keys and values are read in place, neither repeated nor transposed in memory. Computed in f32
/// (f64 for f64); the result has the dtype of `q`. A query that sees no key gives 0. What the
/// handwritten backward needs depends on the implementation:
///
/// - [`AttentionKernel::Cubecl`] saves `q`, `k`, `v`, the result and the LSE, one number per row.
///   Its results have the same bits in every run.
/// - [`AttentionKernel::Cudnn`] saves as much; its bits may differ between runs.
/// - Elsewhere the probabilities are saved too, so memory grows with `s_q * s_k`.
///
/// # Shapes
/// - `q`: `[s_q, b, hq, d]`
/// - `k`: `[s_k, b, hkv, d]`, `v`: `[s_k, b, hkv, d_v]`
/// - result: `[s_q, b, hq * d_v]`
///
/// # Panics
/// If the shapes do not fit, `hkv` does not divide `hq`, a dimension is empty, or an option is out
/// of its range or does not fit the shapes.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<3> {
    let options = checked([&q, &k, &v], options);
    let [s_q, b, hq, _] = q.dims();
    let d_v = v.dims()[3];
    let q = q.into_dispatch();
    let k = k.into_dispatch();
    let v = v.into_dispatch();
    let y: Tensor<4> = megaburn_autograd::fused(Attention(options), [q, k, v]);
    y.reshape([s_q, b, hq * d_v])
}

/// Checks the arguments; returns the options without a dropout of probability 0. Panics if anything
/// does not fit.
fn checked([q, k, v]: [&Tensor<4>; 3], options: AttentionOptions) -> AttentionOptions {
    arg_check::check("attention", [float("q", q), float("k", k), float("v", v)]);
    let [s_q, b, hq, d] = q.dims();
    let [s_k, b_k, hkv, d_k] = k.dims();
    let [s_v, b_v, h_v, _] = v.dims();
    let shapes = [q, k, v].map(|x| x.dims());
    assert!(
        (b, d, s_k, b, hkv) == (b_k, d_k, s_v, b_v, h_v)
            && shapes.iter().all(|shape| !shape.contains(&0))
            && hq.is_multiple_of(hkv),
        "attention: q {:?}, k {:?}, v {:?} are not [s_q, b, hq, d], [s_k, b, hkv, d], [s_k, b, hkv, d_v] with hkv dividing hq and no empty dimension",
        shapes[0],
        shapes[1],
        shapes[2]
    );
    options.check([b, hq, s_q, s_k]);
    AttentionOptions {
        dropout: options.dropout.filter(|dropout| dropout.p > 0.0),
        ..options
    }
}

#[cfg(test)]
mod tests;

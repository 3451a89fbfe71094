//! Attention as one fused operation of the device, where there is one.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;

use super::options::AttentionOptions;

/// What is saved for backward.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "only GPUs have a fused attention")
)]
pub(super) struct Saved<T> {
    /// `[s_q, b, hq, d]`.
    pub(super) q: T,
    /// `[s_k, b, hkv, d]`.
    pub(super) k: T,
    /// `[s_k, b, hkv, d_v]`.
    pub(super) v: T,
    /// The bias of the scores, `[hq, s_q + s_k - 1]`, if there is one.
    pub(super) bias: Option<T>,
    /// `[s_q, b, hq, d_v]`.
    pub(super) out: T,
    /// The LSE, `[b, hq, s_q]` in f32.
    pub(super) lse: T,
    pub(super) options: AttentionOptions,
}

/// The gradients of `q`, `k` and `v`, and of the bias if there is one.
pub(super) type FusedGradients<B> = ([FloatTensor<B>; 3], Option<FloatTensor<B>>);

pub(super) trait Fused: Backend {
    /// Computes the result, `[s_q, b, hq, d_v]`, as part of [`Saved`]; `None` if the device does
    /// not support it.
    fn fused(
        q: &FloatTensor<Self>,
        k: &FloatTensor<Self>,
        v: &FloatTensor<Self>,
        bias: Option<&FloatTensor<Self>>,
        options: &AttentionOptions,
    ) -> Option<Saved<FloatTensor<Self>>>;

    /// The gradients of `q`, `k` and `v`, and of the bias if there is one, from the gradient of the
    /// result.
    fn fused_gradients(
        saved: Saved<FloatTensor<Self>>,
        dout: FloatTensor<Self>,
    ) -> FusedGradients<Self>;
}

//! Attention with autodiff.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::{FusedOp, InputGrads, optional};

use super::fallback;
use super::fused::{self, Fused};
use super::options::AttentionOptions;
use super::scores::Scores;
use crate::gemm_ops::GemmOps;

/// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` and, if there is one, a
/// bias `[hq, s_q + s_k - 1]` to `[s_q, b, hq, d_v]`.
#[derive(Debug)]
pub(super) struct Attention(pub(super) AttentionOptions);

/// What is saved for backward.
#[derive(Clone, Debug)]
pub(super) enum Saved<T> {
    Fused(fused::Saved<T>),
    FallbackAttention(fallback::FallbackAttention<T>),
}

impl<B: GemmOps + Scores + Fused, const N: usize> FusedOp<B, N> for Attention {
    type Saved = Saved<FloatTensor<B>>;

    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
        let Self(options) = self;
        let ([q, k, v], [bias]) = optional(inputs);
        if let Some(saved) = B::fused(&q, &k, &v, bias.as_ref(), &options) {
            return (saved.out.clone(), Saved::Fused(saved));
        }
        let (y, saved) = fallback::forward::<B>([q, k, v], bias, &options);
        (y, Saved::FallbackAttention(saved))
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let (gradients, of_bias) = match saved {
            Saved::Fused(saved) => {
                let dy = cast::<B>(dy, saved.out.dtype().into());
                B::fused_gradients(saved, dy)
            }
            Saved::FallbackAttention(saved) => fallback::backward::<B>(saved, dy),
        };
        grads.register_all(gradients.map(Some).into_iter().chain([of_bias]));
    }
}

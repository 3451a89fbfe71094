//! Attention with autodiff.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::{FusedOp, InputGrads};

use super::fallback;
use super::fused::{self, Fused};
use super::options::AttentionOptions;
use super::scores::Scores;
use crate::gemm_ops::GemmOps;

/// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` to `[s_q, b, hq, d_v]`.
#[derive(Debug)]
pub(super) struct Attention(pub(super) AttentionOptions);

/// What is saved for backward.
#[derive(Clone, Debug)]
pub(super) enum Saved<T> {
    Fused(fused::Saved<T>),
    FallbackAttention(fallback::FallbackAttention<T>),
}

impl<B: GemmOps + Scores + Fused> FusedOp<B, 3> for Attention {
    type Saved = Saved<FloatTensor<B>>;

    fn forward(self, [q, k, v]: [FloatTensor<B>; 3]) -> (FloatTensor<B>, Self::Saved) {
        let Self(options) = self;
        if let Some(saved) = B::fused(&q, &k, &v, &options) {
            return (saved.out.clone(), Saved::Fused(saved));
        }
        let (y, saved) = fallback::forward::<B>(q, k, v, &options);
        (y, Saved::FallbackAttention(saved))
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let gradients = match saved {
            Saved::Fused(saved) => {
                let dy = cast::<B>(dy, saved.out.dtype().into());
                B::fused_gradients(saved, dy)
            }
            Saved::FallbackAttention(saved) => fallback::backward::<B>(saved, dy),
        };
        grads.register_all(gradients.map(Some));
    }
}

//! Attention with autodiff.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::on_every_backend;

use super::AttentionOptions;
use super::fallback;
use super::fused::{self, Fused};
use super::scores::Scores;
use crate::gemm_ops::GemmOps;

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait AttentionOps: Backend {
    /// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` to `[s_q, b, hq, d_v]`.
    /// (The name `attention` is taken by Burn's `ModuleOps`.)
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl AttentionOps {
        fn grouped_attention(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            options: AttentionOptions,
        ) -> FloatTensor<Self> {
            attend::<Self>(q, k, v, &options).0
        }
    }
}

/// What is saved for backward.
#[derive(Clone, Debug)]
enum Saved<T> {
    Fused(fused::Saved<T>),
    FallbackAttention(fallback::FallbackAttention<T>),
}

fn attend<B: GemmOps + Scores + Fused>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Saved<FloatTensor<B>>) {
    if let Some(saved) = B::fused(&q, &k, &v, options) {
        return (saved.out.clone(), Saved::Fused(saved));
    }
    let (y, saved) = fallback::forward::<B>(q, k, v, options);
    (y, Saved::FallbackAttention(saved))
}

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionOps + GemmOps + Scores + Fused> Backward<B, 3> for AttentionBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let gradients = match ops.state {
            Saved::Fused(saved) => {
                let dy = cast::<B>(dy, saved.out.dtype().into());
                B::fused_gradients(saved, dy)
            }
            Saved::FallbackAttention(saved) => fallback::backward::<B>(saved, dy),
        };
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: AttentionOps + GemmOps + Scores + Fused, C: CheckpointStrategy> AttentionOps
    for Autodiff<B, C>
{
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        let (q, for_q) = q.into_parts();
        let (k, for_k) = k.into_parts();
        let (v, for_v) = v.into_parts();
        match AttentionBackward
            .prepare::<C>([for_q, for_k, for_v])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => {
                let (y, saved) = attend::<B>(q, k, v, &options);
                op.finish(saved, y)
            }
            OpsKind::UnTracked(op) => op.finish(B::grouped_attention(q, k, v, options)),
        }
    }
}

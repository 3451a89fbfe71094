//! The softmax of scores on a GPU, under automatic differentiation.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::cast;

use super::SoftmaxMask;

/// The fused softmax and its gradient. All shapes are `[b, h, s_q, s_k]`.
#[backend_extension(Cube, Autodiff)]
pub(crate) trait ScoreSoftmax: Backend {
    /// `softmax(scores * scale)`; if `causal`, over the first `i + 1` keys of query `i`.
    fn scaled_softmax(scores: FloatTensor<Self>, scale: f64, causal: bool) -> FloatTensor<Self>;

    /// `softmax(scores * scale)` over the keys where `mask`, `[b or 1, h or 1, s_q, s_k]`, is
    /// false.
    fn masked_softmax(
        scores: FloatTensor<Self>,
        mask: BoolTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self>;

    /// `scale * p * (dp - sum(p * dp))`. If `causal`, `p` is 0 for keys `j > i` of query `i`.
    fn softmax_gradient(
        p: FloatTensor<Self>,
        dp: FloatTensor<Self>,
        scale: f64,
        causal: bool,
    ) -> FloatTensor<Self>;
}

/// See [`scale_mask_softmax`](crate::scale_mask_softmax).
pub(super) fn on_gpu(scores: Tensor<4>, mask: SoftmaxMask, scale: f64) -> Tensor<4> {
    let scores = scores.into_dispatch();
    Tensor::from_dispatch(match mask {
        SoftmaxMask::None => <Dispatch as ScoreSoftmax>::scaled_softmax(scores, scale, false),
        SoftmaxMask::Causal => <Dispatch as ScoreSoftmax>::scaled_softmax(scores, scale, true),
        SoftmaxMask::Masked(mask) => {
            <Dispatch as ScoreSoftmax>::masked_softmax(scores, mask.into_dispatch(), scale)
        }
    })
}

#[derive(Debug)]
struct SoftmaxBackward;

impl<B: ScoreSoftmax> Backward<B, 1> for SoftmaxBackward {
    type State = (FloatTensor<B>, f64, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (p, scale, causal) = ops.state;
        let dp = cast::<B>(grads.consume::<B>(&ops.node), p.dtype().into());
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, B::softmax_gradient(p, dp, scale, causal));
        }
    }
}

impl<B: ScoreSoftmax, C: CheckpointStrategy> ScoreSoftmax for Autodiff<B, C> {
    fn scaled_softmax(scores: FloatTensor<Self>, scale: f64, causal: bool) -> FloatTensor<Self> {
        let (scores, node) = scores.into_parts();
        let p = B::scaled_softmax(scores, scale, causal);
        match SoftmaxBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((p.clone(), scale, causal), p),
            OpsKind::UnTracked(op) => op.finish(p),
        }
    }

    fn masked_softmax(
        scores: FloatTensor<Self>,
        mask: BoolTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        let (scores, node) = scores.into_parts();
        let p = B::masked_softmax(scores, mask, scale);
        match SoftmaxBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((p.clone(), scale, false), p),
            OpsKind::UnTracked(op) => op.finish(p),
        }
    }

    fn softmax_gradient(
        _p: FloatTensor<Self>,
        _dp: FloatTensor<Self>,
        _scale: f64,
        _causal: bool,
    ) -> FloatTensor<Self> {
        unreachable!("second-order gradients are not supported")
    }
}

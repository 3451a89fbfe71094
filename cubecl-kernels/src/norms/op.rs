//! Norms under automatic differentiation.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use megaburn_autograd::on_every_backend;

use super::{NormCall, NormInput, NormInputGrads, NormRows, SavedNorm};

// (The methods cannot be called `layer_norm`: Burn's `ModuleOps` has one. `backend_extension` does
// not support optional tensors, hence two methods.)
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait NormOps: Backend {
    /// `x: [.., n]`, `gamma: [n]`.
    fn scaled_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        call: NormCall,
    ) -> FloatTensor<Self>;

    /// `x: [.., n]`, `gamma, beta: [n]`.
    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        call: NormCall,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl NormOps {
        fn scaled_norm(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            call: NormCall,
        ) -> FloatTensor<Self> {
            Self::normed(call.norm, NormInput { x, residual: None, gamma, beta: None })
        }

        fn affine_norm(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            call: NormCall,
        ) -> FloatTensor<Self> {
            Self::normed(call.norm, NormInput { x, residual: None, gamma, beta: Some(beta) })
        }
    }
}

/// Backward of a norm; the parents are `x`, `gamma` and, if present, `beta`.
#[derive(Debug)]
struct NormBackward;

impl<B: NormRows, const N: usize> Backward<B, N> for NormBackward {
    type State = (NormCall, SavedNorm<FloatTensor<B>>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (NormCall { norm, sums }, saved) = ops.state;
        let NormInputGrads { x, gamma, beta } = B::backward(norm, saved, dy, None, &sums);
        let found = [Some(x), gamma, beta];
        for (parent, gradient) in ops.parents.into_iter().zip(found) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: NormOps + NormRows, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn scaled_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        call: NormCall,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (gamma, for_gamma) = gamma.into_parts();
        let input = NormInput {
            x,
            residual: None,
            gamma,
            beta: None,
        };
        let (y, _, saved) = B::forward(call.norm, input);
        match NormBackward
            .prepare::<C>([for_x, for_gamma])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((call, saved), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }

    fn affine_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        call: NormCall,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (gamma, for_gamma) = gamma.into_parts();
        let (beta, for_beta) = beta.into_parts();
        let input = NormInput {
            x,
            residual: None,
            gamma,
            beta: Some(beta),
        };
        let (y, _, saved) = B::forward(call.norm, input);
        let nodes = [for_x, for_gamma, for_beta];
        match NormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish((call, saved), y),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }
}

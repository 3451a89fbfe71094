//! A residual addition fused with a norm; both results have gradients (through `multi_output`).

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::multi_output::{OutputGrads, multi_output};
use megaburn_autograd::on_every_backend;

use super::{NormCall, NormInput, NormInputGrads, NormRows, SavedNorm};

/// Returns `norm(x + residual)` and `x + residual`.
pub(crate) fn norm_add<const D: usize>(
    name: &str,
    [x, residual]: [Tensor<D>; 2],
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    call: NormCall,
) -> (Tensor<D>, Tensor<D>) {
    let [(shape, dtype), other] = [&x, &residual].map(|t| (t.dims(), t.dtype()));
    assert_eq!(
        (shape, dtype),
        other,
        "{name}: the shapes or dtypes of x and the residual differ"
    );
    arg_check::check(name, [float("x", &x), float("the residual", &residual)]);
    let [x, residual] = [x, residual].map(Tensor::into_dispatch);
    let gamma = gamma.into_dispatch();
    let (y, sum) = match beta {
        Some(beta) => Dispatch::affine_norm_add(x, residual, gamma, beta.into_dispatch(), call),
        None => Dispatch::scaled_norm_add(x, residual, gamma, call),
    };
    (Tensor::from_dispatch(y), Tensor::from_dispatch(sum))
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait AddNormOps: Backend {
    /// `x, residual: [.., n]`, `gamma: [n]`; returns the normalized rows and the sum.
    fn scaled_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        call: NormCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `x, residual: [.., n]`, `gamma, beta: [n]`; returns the normalized rows and the sum.
    fn affine_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        call: NormCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

on_every_backend! {
    impl AddNormOps {
        fn scaled_norm_add(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            call: NormCall,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let input = NormInput { x, residual: Some(residual), gamma, beta: None };
            let (y, sum, _) = Self::forward(call.norm, input);
            (y, sum)
        }

        fn affine_norm_add(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            call: NormCall,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let input = NormInput { x, residual: Some(residual), gamma, beta: Some(beta) };
            let (y, sum, _) = Self::forward(call.norm, input);
            (y, sum)
        }
    }
}

/// Backward of the fused norm; the parents are `x`, the residual, `gamma` and, if present, `beta`.
#[derive(Debug)]
struct AddNormBackward;

impl<B: NormRows, const N: usize> Backward<B, N> for AddNormBackward {
    /// The [`OutputGrads`] have slots for the normalized rows and the sum.
    type State = (NormCall, SavedNorm<FloatTensor<B>>, OutputGrads);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        // This gradient only signals that `OutputGrads` is not empty.
        drop(grads.consume::<B>(&ops.node));
        let (NormCall { norm, sums }, saved, mailbox) = ops.state;
        let mut taken = mailbox.take::<B>().into_iter();
        let found = match [taken.next().flatten(), taken.next().flatten()] {
            [Some(dy), dsum] => {
                let NormInputGrads { x, gamma, beta } = B::backward(norm, saved, dy, dsum, &sums);
                [Some(x.clone()), Some(x), gamma, beta]
            }
            [None, dsum] => [dsum.clone(), dsum, None, None],
        };
        for (parent, gradient) in ops.parents.into_iter().zip(found) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// A tensor under automatic differentiation.
type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Splits the two results of an operation whose graph output is `sum`.
fn both_outputs<B: Backend, C: CheckpointStrategy>(
    y: FloatTensor<B>,
    sum: Tracked<B, C>,
    mailbox: &OutputGrads,
) -> (Tracked<B, C>, Tracked<B, C>) {
    (
        multi_output::<B, C>(sum.clone(), mailbox, 0, |_| y),
        multi_output::<B, C>(sum, mailbox, 1, |sum| sum),
    )
}

impl<B: AddNormOps + NormRows, C: CheckpointStrategy> AddNormOps for Autodiff<B, C> {
    fn scaled_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        call: NormCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, for_x) = x.into_parts();
        let (residual, for_residual) = residual.into_parts();
        let (gamma, for_gamma) = gamma.into_parts();
        let input = NormInput {
            x,
            residual: Some(residual),
            gamma,
            beta: None,
        };
        let (y, sum, saved) = B::forward(call.norm, input);
        let mailbox = OutputGrads::new(2);
        let nodes = [for_x, for_residual, for_gamma];
        let sum = match AddNormBackward
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((call, saved, mailbox.clone()), sum),
            OpsKind::UnTracked(op) => op.finish(sum),
        };
        both_outputs::<B, C>(y, sum, &mailbox)
    }

    fn affine_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        call: NormCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, for_x) = x.into_parts();
        let (residual, for_residual) = residual.into_parts();
        let (gamma, for_gamma) = gamma.into_parts();
        let (beta, for_beta) = beta.into_parts();
        let input = NormInput {
            x,
            residual: Some(residual),
            gamma,
            beta: Some(beta),
        };
        let (y, sum, saved) = B::forward(call.norm, input);
        let mailbox = OutputGrads::new(2);
        let nodes = [for_x, for_residual, for_gamma, for_beta];
        let sum = match AddNormBackward
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((call, saved, mailbox.clone()), sum),
            OpsKind::UnTracked(op) => op.finish(sum),
        };
        both_outputs::<B, C>(y, sum, &mailbox)
    }
}

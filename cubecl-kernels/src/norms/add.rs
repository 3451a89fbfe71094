//! A residual sum and its norm in one pass, both with gradients.
//!
//! Burn's automatic differentiation has operations of one output. Here the operation's output is the
//! sum, which nobody sees; a port of each result passes its gradient on as it is, through a mailbox,
//! and the operation takes all of them at once. Whichever port runs first also registers its gradient
//! for the operation, as a sign that there is one: no pass over memory is made for it.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;

use super::{Grads, Input, Norm, NormRows, Saved};
use crate::backends::on_every_backend;

/// `norm(x + residual)` and `x + residual`.
pub(crate) fn norm_add<const D: usize>(
    name: &str,
    [x, residual]: [Tensor<D>; 2],
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    norm: Norm,
) -> (Tensor<D>, Tensor<D>) {
    let [(shape, dtype), other] = [&x, &residual].map(|t| (t.dims(), t.dtype()));
    assert_eq!((shape, dtype), other, "{name}: x and the residual differ in shape or dtype");
    let [x, residual] = [x, residual].map(Tensor::into_dispatch);
    let gamma = gamma.into_dispatch();
    let (y, sum) = match beta {
        Some(beta) => Dispatch::affine_norm_add(x, residual, gamma, beta.into_dispatch(), norm),
        None => Dispatch::scaled_norm_add(x, residual, gamma, norm),
    };
    (Tensor::from_dispatch(y), Tensor::from_dispatch(sum))
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait AddNormOps: Backend {
    /// `x, residual: [.., n]`, `gamma: [n]`; the normed rows and the sum.
    fn scaled_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        norm: Norm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `x, residual: [.., n]`, `gamma, beta: [n]`; the normed rows and the sum.
    fn affine_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        norm: Norm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

on_every_backend! {
    impl AddNormOps {
        fn scaled_norm_add(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            norm: Norm,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let input = Input { x, residual: Some(residual), gamma, beta: None };
            let (y, sum, _) = Self::forward(norm, input);
            (y, sum)
        }

        fn affine_norm_add(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            norm: Norm,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let input = Input { x, residual: Some(residual), gamma, beta: Some(beta) };
            let (y, sum, _) = Self::forward(norm, input);
            (y, sum)
        }
    }
}

/// The gradients of the normed rows and of the sum, on their way to the operation.
type Mailbox<T> = Arc<Mutex<[Option<T>; 2]>>;

/// Leaves the gradient of one result in the mailbox.
#[derive(Debug)]
struct PortBackward;

impl<B: Backend> Backward<B, 1> for PortBackward {
    /// The mailbox, and the place in it.
    type State = (Mailbox<FloatTensor<B>>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        let (mailbox, place) = ops.state;
        let mut mailbox = mailbox.lock().unwrap_or_else(PoisonError::into_inner);
        if mailbox.iter().all(Option::is_none)
            && let Some(node) = parent
        {
            grads.register::<B>(node.id, gradient.clone());
        }
        mailbox[place] = Some(gradient);
    }
}

/// The parents are `x`, the residual, `gamma` and, where there is one, `beta`.
#[derive(Debug)]
struct AddNormBackward;

impl<B: NormRows, const N: usize> Backward<B, N> for AddNormBackward {
    type State = (Norm, Saved<FloatTensor<B>>, Mailbox<FloatTensor<B>>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        // Only the sign that the mailbox is not empty.
        drop(grads.consume::<B>(&ops.node));
        let (norm, saved, mailbox) = ops.state;
        let taken =
            mailbox.lock().unwrap_or_else(PoisonError::into_inner).each_mut().map(Option::take);
        let found = match taken {
            [Some(dy), dsum] => {
                let Grads { x, gamma, beta } = B::backward(norm, saved, dy, dsum);
                [Some(x.clone()), Some(x), Some(gamma), beta]
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

/// The two results of an operation, whose output is `sum`.
fn ports<B: Backend, C: CheckpointStrategy>(
    y: FloatTensor<B>,
    sum: Tracked<B, C>,
    mailbox: &Mailbox<FloatTensor<B>>,
) -> (Tracked<B, C>, Tracked<B, C>) {
    let (for_y, (sum, for_sum)) = (sum.node(), sum.into_parts());
    let [y, sum] =
        [(y, for_y, 0), (sum, for_sum, 1)].map(|(result, node, place)| {
            match PortBackward.prepare::<C>([node]).compute_bound().stateful() {
                OpsKind::Tracked(op) => op.finish((mailbox.clone(), place), result),
                OpsKind::UnTracked(op) => op.finish(result),
            }
        });
    (y, sum)
}

impl<B: AddNormOps + NormRows, C: CheckpointStrategy> AddNormOps for Autodiff<B, C> {
    fn scaled_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        norm: Norm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ((x, for_x), (residual, for_residual)) = (x.into_parts(), residual.into_parts());
        let (gamma, for_gamma) = gamma.into_parts();
        let input = Input { x, residual: Some(residual), gamma, beta: None };
        let (y, sum, saved) = B::forward(norm, input);
        let mailbox = Mailbox::default();
        let nodes = [for_x, for_residual, for_gamma];
        let sum = match AddNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish((norm, saved, mailbox.clone()), sum),
            OpsKind::UnTracked(op) => op.finish(sum),
        };
        ports::<B, C>(y, sum, &mailbox)
    }

    fn affine_norm_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        norm: Norm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ((x, for_x), (residual, for_residual)) = (x.into_parts(), residual.into_parts());
        let ((gamma, for_gamma), (beta, for_beta)) = (gamma.into_parts(), beta.into_parts());
        let input = Input { x, residual: Some(residual), gamma, beta: Some(beta) };
        let (y, sum, saved) = B::forward(norm, input);
        let mailbox = Mailbox::default();
        let nodes = [for_x, for_residual, for_gamma, for_beta];
        let sum = match AddNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish((norm, saved, mailbox.clone()), sum),
            OpsKind::UnTracked(op) => op.finish(sum),
        };
        ports::<B, C>(y, sum, &mailbox)
    }
}

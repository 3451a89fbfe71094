//! Operations with several differentiable results.
//!
//! Burn's autodiff supports operations of one output only. Here that output is hidden. Each result
//! is a node after it that passes its own gradient on through [`OutputGrads`], and the operation
//! takes all of them at once. The node that runs first also registers its gradient with the
//! operation, only as a signal that there is one; this takes no pass over memory.

use std::any::Any;
use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Backend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

/// A gradient on any backend.
type AnyTensor = Box<dyn Any + Send>;

/// The gradients of an operation's results, collected for its backward.
#[derive(Clone)]
pub struct OutputGrads(Arc<Mutex<Vec<Option<AnyTensor>>>>);

impl Debug for OutputGrads {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OutputGrads")
            .field(&self.places().len())
            .finish()
    }
}

impl OutputGrads {
    /// Has an empty slot for each of the results.
    pub fn new(results: usize) -> Self {
        Self(Arc::new(Mutex::new((0..results).map(|_| None).collect())))
    }

    /// Takes the gradient of each result that has one, and leaves the slots empty. The gradient
    /// that was registered for the operation itself is one of them.
    pub fn take<B: Backend>(&self) -> Vec<Option<FloatTensor<B>>> {
        let taken = |place: &mut Option<AnyTensor>| {
            place.take().map(|grad| {
                *grad
                    .downcast()
                    .expect("all results are on the same backend")
            })
        };
        self.places().iter_mut().map(taken).collect()
    }

    /// Stores a gradient; returns whether it is the first.
    fn leave(&self, place: usize, grad: AnyTensor) -> bool {
        let mut places = self.places();
        let first = places.iter().all(Option::is_none);
        places[place] = Some(grad);
        first
    }

    fn places(&self) -> MutexGuard<'_, Vec<Option<AnyTensor>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stores the gradient of one result in [`OutputGrads`].
#[derive(Debug)]
struct MultiOutputBackward;

impl<B: Backend> Backward<B, 1> for MultiOutputBackward {
    /// The slots of the operation, and the index of this result.
    type State = (OutputGrads, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        let (mailbox, place) = ops.state;
        let first = mailbox.leave(place, Box::new(grad.clone()));
        if let (Some(node), true) = (parent, first) {
            grads.register::<B>(node.id, grad);
        }
    }
}

/// The result at index `place`, made from the output of its operation.
pub fn multi_output<B: Backend, C: CheckpointStrategy>(
    output: FloatTensor<Autodiff<B, C>>,
    mailbox: &OutputGrads,
    place: usize,
    result: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let (output, node) = output.into_parts();
    let result = result(output);
    match MultiOutputBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(op) => op.finish((mailbox.clone(), place), result),
        OpsKind::UnTracked(op) => op.finish(result),
    }
}

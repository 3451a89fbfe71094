//! Operations of several results, all with gradients.
//!
//! Burn's automatic differentiation has operations of one output. Here that output is one that nobody
//! sees; a port of each result passes its gradient on as it is, through a mailbox, and the operation
//! takes all of them at once. Whichever port runs first also registers its gradient for the operation,
//! as a sign that there is one: no pass over memory is made for it.

use std::any::Any;
use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Backend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

/// A gradient of whichever backend.
type AnyTensor = Box<dyn Any + Send>;

/// The gradients of an operation's results, on their way to it.
#[derive(Clone)]
pub(crate) struct OutputGrads(Arc<Mutex<Vec<Option<AnyTensor>>>>);

impl Debug for OutputGrads {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mailbox")
            .field(&self.places().len())
            .finish()
    }
}

impl OutputGrads {
    /// With a place for each of the results.
    pub(crate) fn new(results: usize) -> Self {
        Self(Arc::new(Mutex::new((0..results).map(|_| None).collect())))
    }

    /// The gradients of the results that have one; none is left. What was registered for the
    /// operation itself is one of them.
    pub(crate) fn take<B: Backend>(&self) -> Vec<Option<FloatTensor<B>>> {
        let taken = |place: &mut Option<AnyTensor>| {
            place
                .take()
                .map(|grad| *grad.downcast().expect("all results are on one backend"))
        };
        self.places().iter_mut().map(taken).collect()
    }

    /// Whether it is the first.
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

/// Leaves the gradient of one result in the mailbox.
#[derive(Debug)]
struct MultiOutputBackward;

impl<B: Backend> Backward<B, 1> for MultiOutputBackward {
    /// The mailbox, and the place in it.
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

/// The result at a place of the mailbox, made from the output of its operation.
pub(crate) fn multi_output<B: Backend, C: CheckpointStrategy>(
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

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use megaburn_autograd::CheckpointOperands;

/// The input of a stage's graph. It holds only the gradient; the tensor itself lives only as long
/// as layers need it, because they may have offloaded it.
pub(super) struct StageInput(Slot);

type Slot = Arc<Mutex<Option<Tensor<3>>>>;

impl StageInput {
    /// Makes another stage's output the input of a graph.
    pub(super) fn of(x: Tensor<3>) -> (Tensor<3>, Self) {
        let x = Tensor::<3>::from_inner(x);
        let slot = Slot::default();
        let mut operands = CheckpointOperands::new(&x.device());
        // A dummy operand that requires a gradient, so that autodiff records the function.
        operands.add(Tensor::<1>::empty([1], &x.device()).require_grad());
        let came = slot.clone();
        let [x] = operands.results([x], move |[gradient]| {
            *came.lock().unwrap_or_else(PoisonError::into_inner) = gradient;
            vec![None]
        });
        (x, Self(slot))
    }

    /// Returns the gradient that backward computed for the input.
    pub(super) fn gradient(self) -> Option<Tensor<3>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use megaburn_kernels::CheckpointFunction;

/// The beginning of a stage's graph, of which only the gradient is kept: the tensor itself is there for as
/// long as layers need it, which may have put it elsewhere.
pub(super) struct StageInput(Slot);

type Slot = Arc<Mutex<Option<Tensor<3>>>>;

impl StageInput {
    /// Of what another stage made: as the input of a graph.
    pub(super) fn of(x: Tensor<3>) -> (Tensor<3>, Self) {
        let x = Tensor::<3>::from_inner(x);
        let slot = Slot::default();
        let mut operands = CheckpointFunction::new(&x.device());
        operands.add(Tensor::<1>::empty([1], &x.device()).require_grad());
        let came = slot.clone();
        let [x] = operands.results([x], move |[gradient]| {
            *came.lock().unwrap_or_else(PoisonError::into_inner) = gradient;
            vec![None]
        });
        (x, Self(slot))
    }

    /// What backward came to here with.
    pub(super) fn gradient(self) -> Option<Tensor<3>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::deferred::run_or_defer;

/// Products of a backward that give weights their gradients, put off until something is sent that they can run
/// beside: then who sends [computes](Self::compute) them. Copies share them.
///
/// Within [`WgradQueue::defer`](crate::WeightGradients::defer) they are put off further.
///
/// Source: Megatron-LM `--delay-wgrad-compute`.
#[derive(Clone, Default)]
pub struct OverlappedWgrads(Arc<Mutex<Vec<OverlappedWork>>>);

struct OverlappedWork {
    product: Box<dyn FnOnce() + Send>,
    /// The shape of what it gives.
    of: [usize; 2],
}

impl OverlappedWgrads {
    pub(super) fn put(&self, of: [usize; 2], product: impl FnOnce() + Send + 'static) {
        let work = OverlappedWork {
            product: Box::new(product),
            of,
        };
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(work);
    }

    /// Computes them, in the order in which backward came to them.
    pub fn compute(&self) {
        let all = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        all.into_iter()
            .for_each(|OverlappedWork { product, of }| run_or_defer(of, product));
    }
}

impl fmt::Debug for OverlappedWgrads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        write!(f, "Beside({len})")
    }
}

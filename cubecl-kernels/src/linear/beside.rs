use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::deferred::now_or_later;

/// Products of a backward that give weights their gradients, put off until something is sent that they can run
/// beside: then who sends [computes](Self::compute) them. Copies share them.
///
/// Within [`WeightGradients::defer`](crate::WeightGradients::defer) they are put off further.
///
/// Source: Megatron-LM `--delay-wgrad-compute`.
#[derive(Clone, Default)]
pub struct Beside(Arc<Mutex<Vec<Work>>>);

struct Work {
    product: Box<dyn FnOnce() + Send>,
    /// The shape of what it gives.
    of: [usize; 2],
}

impl Beside {
    pub(super) fn put(&self, of: [usize; 2], product: impl FnOnce() + Send + 'static) {
        let work = Work {
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
            .for_each(|Work { product, of }| now_or_later(of, product));
    }
}

impl fmt::Debug for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        write!(f, "Beside({len})")
    }
}

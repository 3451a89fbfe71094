//! Weight gradients that wait for a send to overlap with.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::wgrad_queue::run_or_defer;

/// The weight-gradient products of a backward pass, deferred until the same pass has started a send
/// that they can overlap with: then the sender [computes](Self::compute) them. Clones share the
/// products.
///
/// Within [`WgradQueue::defer`](crate::WgradQueue::defer) they are deferred further.
///
/// Source: Megatron-LM `--delay-wgrad-compute`.
#[derive(Clone, Default)]
pub struct OverlappedWgrads(Arc<Mutex<Vec<Product>>>);

type Product = Box<dyn FnOnce() + Send>;

impl OverlappedWgrads {
    /// Adds a product.
    pub fn put(&self, product: impl FnOnce() + Send + 'static) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(product));
    }

    /// Computes the products in the order in which the backward pass reached them.
    pub fn compute(&self) {
        let all = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        all.into_iter().for_each(run_or_defer);
    }
}

impl fmt::Debug for OverlappedWgrads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        write!(f, "OverlappedWgrads({len})")
    }
}

//! Weight gradients that a backward pass leaves for later.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

type Product = Box<dyn FnOnce()>;

/// Products that were deferred, in the order in which the backward pass reached them.
type Queue = Rc<RefCell<Vec<Product>>>;

thread_local! {
    /// Where the running backward pass of this thread puts its products, if it defers them.
    static DEFERRED: RefCell<Option<Queue>> = const { RefCell::new(None) };
}

/// The matrix products of a backward pass that compute the weight gradients of linear layers,
/// deferred until [`compute`](Self::compute) is called.
///
/// ```
/// use megaburn_autograd::{WgradQueue, run_or_defer};
///
/// let queue = WgradQueue::default();
/// queue.defer(|| run_or_defer(|| println!("computed later")));
/// queue.compute();
/// ```
#[must_use = "weight gradients are missing until `compute` is called"]
#[derive(Default)]
pub struct WgradQueue(Queue);

impl WgradQueue {
    /// Runs a backward pass on this thread and defers its weight-gradient products to `self`: those
    /// of linear layers with an attached [`MainGrad`](crate::MainGrad). Inputs, biases, norms and
    /// embeddings get their gradients at once.
    ///
    /// Source: Qi et al. 2023, <https://arxiv.org/abs/2401.10241>, section 2; Megatron-LM
    /// `--delay-wgrad-compute`.
    pub fn defer<T>(&self, backward: impl FnOnce() -> T) -> T {
        let _before = Before(DEFERRED.replace(Some(self.0.clone())));
        backward()
    }

    /// Computes all products in the order in which the backward pass reached them. Each is added to
    /// its [`MainGrad`](crate::MainGrad), which notifies its listener.
    pub fn compute(self) {
        self.0.take().into_iter().for_each(|product| product());
    }
}

impl fmt::Debug for WgradQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgradQueue({})", self.0.borrow().len())
    }
}

/// Runs a backward pass that computes its weight gradients at once, even inside one that
/// [defers](WgradQueue::defer) them. Recomputed activations use it: a deferred product would
/// keep all of them in memory.
pub fn without_deferral<T>(backward: impl FnOnce() -> T) -> T {
    let _before = Before(DEFERRED.take());
    backward()
}

/// Restores the previous queue of the thread on drop, also when a backward pass panics.
struct Before(Option<Queue>);

impl Drop for Before {
    fn drop(&mut self) {
        DEFERRED.set(self.0.take());
    }
}

/// Computes a weight gradient, or defers it if the running backward pass does.
pub fn run_or_defer(product: impl FnOnce() + 'static) {
    match DEFERRED.with_borrow(Clone::clone) {
        Some(queue) => queue.borrow_mut().push(Box::new(product)),
        None => product(),
    }
}

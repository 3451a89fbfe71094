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
#[must_use = "weight gradients are missing until `compute` is called"]
#[derive(Default)]
pub struct WgradQueue(Queue);

impl WgradQueue {
    /// Runs a backward pass on this thread and defers its weight-gradient products to `self`: those
    /// of a [`linear`](crate::linear) or [`grouped_linear`](crate::grouped_linear) with an attached
    /// [`MainGrad`](crate::MainGrad). Inputs, biases, norms and embeddings get their gradients at
    /// once.
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
pub(super) fn run_or_defer(product: impl FnOnce() + 'static) {
    match DEFERRED.with_borrow(Clone::clone) {
        Some(queue) => queue.borrow_mut().push(Box::new(product)),
        None => product(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::testing::{constant, leaf, values};
    use crate::{LinearOptions, MainGrad, linear};

    #[test]
    fn deferred_products_are_added_later_in_the_same_order() {
        let x = leaf(constant([5, 2, 6]));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let bias = leaf(constant([6]));
        let layer = |name: &'static str| {
            let main_grad = MainGrad::default();
            main_grad.attach();
            let heard = heard.clone();
            main_grad.on_gradient(move || heard.lock().unwrap().push(name));
            (leaf(constant([6, 6])), main_grad)
        };
        let layers = ["first", "second"].map(layer);
        let loss = || {
            let through = |x, (w, main): &(_, MainGrad)| {
                let options = LinearOptions {
                    out_in: true,
                    main_grad: Some(main.clone()),
                    ..Default::default()
                };
                linear(
                    x,
                    burn::tensor::Tensor::clone(w),
                    Some(bias.clone()),
                    options,
                )
            };
            let y = layers.iter().fold(x.clone(), through);
            (y.clone() * y).sum()
        };
        let taken = || layers.each_ref().map(|(_, main)| main.take().map(values));
        let at_once = loss().backward();
        let expected = taken();
        let order = std::mem::take(&mut *heard.lock().unwrap());
        assert_eq!(order, ["second", "first"]);

        let deferred = WgradQueue::default();
        let grads = deferred.defer(|| loss().backward());
        assert_eq!((taken(), heard.lock().unwrap().len()), ([None, None], 0));
        assert_eq!(
            values(x.grad(&grads).unwrap()),
            values(x.grad(&at_once).unwrap())
        );
        assert_eq!(
            values(bias.grad(&grads).unwrap()),
            values(bias.grad(&at_once).unwrap())
        );
        deferred.compute();
        assert_eq!(
            (taken(), &*heard.lock().unwrap()),
            (expected.clone(), &order)
        );
        // A backward pass inside that asks for its weight gradients gets them at once.
        let deferred = WgradQueue::default();
        deferred.defer(|| without_deferral(|| loss().backward()));
        assert!(deferred.0.borrow().is_empty());
        assert_eq!(taken(), expected);
        // The backward passes that follow defer nothing.
        loss().backward();
        assert!(taken().iter().all(Option::is_some));
    }
}

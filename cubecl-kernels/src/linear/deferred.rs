use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;

/// A product, and the elements of the matrices whose gradients it gives: what it takes to compute, as far as ranks
/// agree. They have other numbers of tokens for the same expert, and must compute the same products where those
/// are of what other ranks send.
struct DeferredWork {
    product: Box<dyn FnOnce()>,
    size: u64,
}

thread_local! {
    /// What the backward of this thread puts off, if it does.
    static DEFERRED: RefCell<Option<WgradQueue>> = const { RefCell::new(None) };
}

/// Products of a backward that give the gradients of linear layers' weights, still to be computed, in
/// the order in which backward came to them. Copies share them.
#[must_use = "gradients are missing until they are computed"]
#[derive(Clone, Default)]
pub struct WgradQueue(Rc<RefCell<Queue>>);

#[derive(Default)]
struct Queue {
    work: VecDeque<DeferredWork>,
    /// Of all that ever were in it.
    size: u64,
    /// Whether they are computed as they come.
    at_once: bool,
}

impl WgradQueue {
    /// Runs a backward on this thread without the products that give weights' gradients, which are put behind these:
    /// those that go to an attached [`MainGrad`](crate::MainGrad) of a [`linear`](crate::linear). Inputs, biases,
    /// norms and embeddings get theirs.
    ///
    /// Source: Qi et al. 2023, <https://arxiv.org/abs/2401.10241>, section 2; Megatron-LM
    /// `--delay-wgrad-compute`.
    pub fn defer<T>(&self, backward: impl FnOnce() -> T) -> T {
        let _before = Before(DEFERRED.replace(Some(self.clone())));
        backward()
    }

    /// Runs a backward that computes its products as it comes to them, and counts their [size](Self::size) here.
    pub fn measure<T>(&self, backward: impl FnOnce() -> T) -> T {
        self.0.borrow_mut().at_once = true;
        let done = self.defer(backward);
        self.0.borrow_mut().at_once = false;
        done
    }

    /// Computes those that are left: each is added to its [`MainGrad`](crate::MainGrad), which tells its listener.
    pub fn compute(&self) {
        while self.compute_next().is_some() {}
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().work.is_empty()
    }

    /// The elements of the gradients of all that were put off here, computed or not.
    pub fn size(&self) -> u64 {
        self.0.borrow().size
    }

    /// Computes the next one; its size.
    pub(super) fn compute_next(&self) -> Option<u64> {
        // Nothing is borrowed while it is computed.
        let next = self.0.borrow_mut().work.pop_front();
        next.map(|DeferredWork { product, size }| {
            product();
            size
        })
    }

    fn push(&self, work: DeferredWork) {
        let at_once = {
            let mut queue = self.0.borrow_mut();
            queue.size += work.size;
            queue.work.push_back(work);
            queue.at_once
        };
        if at_once {
            self.compute();
        }
    }
}

impl fmt::Debug for WgradQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightGradients({})", self.0.borrow().work.len())
    }
}

/// Runs a backward, maybe inside of one that [puts them off](WgradQueue::defer), with weights' gradients:
/// of what was computed once more they would hold all of it.
pub fn without_deferral<T>(backward: impl FnOnce() -> T) -> T {
    let _before = Before(DEFERRED.take());
    backward()
}

/// What was there, also where a backward panics and somebody goes on.
struct Before(Option<WgradQueue>);

impl Drop for Before {
    fn drop(&mut self) {
        DEFERRED.set(self.0.take());
    }
}

/// Computes the gradient of a weight of this shape, or puts it off.
pub(super) fn run_or_defer(of: [usize; 2], product: impl FnOnce() + 'static) {
    match DEFERRED.with_borrow(Clone::clone) {
        Some(later) => {
            let size = of.iter().map(|&size| size as u64).product();
            later.push(DeferredWork {
                product: Box::new(product),
                size,
            });
        }
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
    fn what_is_put_off_is_added_later_in_the_same_order() {
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

        let put_off = WgradQueue::default();
        let grads = put_off.defer(|| loss().backward());
        assert_eq!((taken(), heard.lock().unwrap().len()), ([None, None], 0));
        assert_eq!(
            values(x.grad(&grads).unwrap()),
            values(x.grad(&at_once).unwrap())
        );
        assert_eq!(
            values(bias.grad(&grads).unwrap()),
            values(bias.grad(&at_once).unwrap())
        );
        put_off.compute();
        assert_eq!(
            (taken(), &*heard.lock().unwrap()),
            (expected.clone(), &order)
        );
        // Nor is what is measured.
        let measured = WgradQueue::default();
        measured.measure(|| loss().backward());
        assert_eq!((measured.is_empty(), measured.size()), (true, 72));
        assert_eq!(taken(), expected.clone());
        // Nor is what says so.
        let put_off = WgradQueue::default();
        put_off.defer(|| without_deferral(|| loss().backward()));
        assert_eq!((put_off.size(), taken()), (0, expected.clone()));
        // What follows is not put off.
        loss().backward();
        assert!(taken().iter().all(Option::is_some));
    }
}

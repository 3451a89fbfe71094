use std::{cell::RefCell, fmt};

type Work = Box<dyn FnOnce()>;

thread_local! {
    /// What the backward of this thread puts off, if it does.
    static PUT_OFF: RefCell<Option<Vec<Work>>> = const { RefCell::new(None) };
}

/// Products of a backward that give the gradients of linear layers' weights, still to be computed, in
/// the order in which backward came to them.
#[must_use = "gradients are missing until they are computed"]
#[derive(Default)]
pub struct WeightGradients(Vec<Work>);

impl WeightGradients {
    /// Computes them: each is added to its [`MainGrad`](crate::MainGrad), which tells its listener.
    pub fn compute(self) {
        self.0.into_iter().for_each(|work| work());
    }
}

impl fmt::Debug for WeightGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightGradients({})", self.0.len())
    }
}

/// Runs a backward on this thread without the products that give weights' gradients: those that go to
/// an attached [`MainGrad`](crate::MainGrad) of a [`linear`](crate::linear). Inputs, biases, norms and
/// embeddings get theirs.
///
/// Source: Qi et al. 2023, <https://arxiv.org/abs/2401.10241>, section 2; Megatron-LM
/// `--delay-wgrad-compute`.
pub fn defer_weight_gradients<T>(backward: impl FnOnce() -> T) -> (T, WeightGradients) {
    let _before = Before(PUT_OFF.replace(Some(Vec::new())));
    let done = backward();
    (done, WeightGradients(PUT_OFF.take().unwrap_or_default()))
}

/// Runs a backward, maybe inside of one that [puts them off](defer_weight_gradients), with weights' gradients:
/// of what was computed once more they would hold all of it.
pub fn with_weight_gradients<T>(backward: impl FnOnce() -> T) -> T {
    let _before = Before(PUT_OFF.take());
    backward()
}

/// What was there, also where a backward panics and somebody goes on.
struct Before(Option<Vec<Work>>);

impl Drop for Before {
    fn drop(&mut self) {
        PUT_OFF.set(self.0.take());
    }
}

/// Computes a weight's gradient, or puts it off.
pub(super) fn now_or_later(work: impl FnOnce() + 'static) {
    let now = PUT_OFF.with_borrow_mut(|put_off| match put_off {
        Some(later) => {
            later.push(Box::new(work));
            None
        }
        None => Some(work),
    });
    if let Some(work) = now {
        work();
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
        let (x, heard) = (leaf(constant([5, 2, 6])), Arc::new(Mutex::new(Vec::new())));
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
                let options =
                    LinearOptions { out_in: true, main_grad: Some(main.clone()), again: None };
                linear(x, burn::tensor::Tensor::clone(w), Some(bias.clone()), options)
            };
            let y = layers.iter().fold(x.clone(), through);
            (y.clone() * y).sum()
        };
        let taken = || layers.each_ref().map(|(_, main)| main.take().map(values));
        let at_once = loss().backward();
        let (expected, order) = (taken(), std::mem::take(&mut *heard.lock().unwrap()));
        assert_eq!(order, ["second", "first"]);

        let (grads, put_off) = defer_weight_gradients(|| loss().backward());
        assert_eq!((taken(), heard.lock().unwrap().len()), ([None, None], 0));
        assert_eq!(values(x.grad(&grads).unwrap()), values(x.grad(&at_once).unwrap()));
        assert_eq!(values(bias.grad(&grads).unwrap()), values(bias.grad(&at_once).unwrap()));
        put_off.compute();
        assert_eq!((taken(), &*heard.lock().unwrap()), (expected.clone(), &order));
        // Nor is what says so.
        let (_, put_off) = defer_weight_gradients(|| with_weight_gradients(|| loss().backward()));
        assert_eq!((put_off.0.len(), taken()), (0, expected.clone()));
        // What follows is not put off.
        loss().backward();
        assert!(taken().iter().all(Option::is_some));
    }
}

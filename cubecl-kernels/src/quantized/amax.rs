//! The largest magnitude that the scale of a matrix is derived from.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::IntoPrimitive;

/// Combines the largest magnitudes of several ranks that hold parts of one matrix.
///
/// # Collective
/// All ranks that share the matrix call it together, by the thread that runs the pass.
#[derive(Clone)]
pub struct AmaxReduction(Arc<dyn Fn(Tensor<1>) -> Tensor<1> + Send + Sync>);

impl AmaxReduction {
    /// Wraps `reduce`.
    ///
    /// # Shapes
    /// `reduce`: `[1]` to `[1]`, f32 without autodiff
    pub fn new(reduce: impl Fn(Tensor<1>) -> Tensor<1> + Send + Sync + 'static) -> Self {
        Self(Arc::new(reduce))
    }
}

impl fmt::Debug for AmaxReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmaxReduction").finish_non_exhaustive()
    }
}

/// Where the largest magnitude of a matrix comes from.
#[derive(Clone, Debug)]
pub enum AmaxSource {
    /// The matrix itself, over all ranks that hold a part of it.
    Current(Option<AmaxReduction>),
    /// The matrices of steps before (delayed scaling).
    Delayed(AmaxHistory),
}

impl Default for AmaxSource {
    fn default() -> Self {
        Self::Current(None)
    }
}

impl AmaxSource {
    /// The largest magnitude to derive the scale of `x` from, `[1]`.
    pub(super) fn of<B: IntoPrimitive>(
        &self,
        x: FloatTensor<B>,
        largest_magnitude: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let found = largest_magnitude(x);
        match self {
            Self::Current(None) => found,
            Self::Current(Some(reduction)) => B::unwrap((reduction.0)(B::wrap(found))),
            Self::Delayed(history) => B::unwrap(history.exchange(B::wrap(found))),
        }
    }
}

/// The largest magnitudes of a matrix in the last steps. Clones share all state.
///
/// The scale of a step is derived from the steps before; in the first step, from its own matrix.
///
/// Source: Transformer Engine, `DelayedScaling`.
#[derive(Clone, Debug)]
pub struct AmaxHistory(Arc<Mutex<History>>);

#[derive(Debug)]
struct History {
    /// The largest magnitudes of the last steps, the oldest first, `[steps]`.
    steps: Option<Tensor<1>>,
    /// The one of them, or their largest, that the scale is derived from, `[1]`.
    derived: Option<Tensor<1>>,
    /// The largest magnitude so far in the current step, `[1]`.
    current: Option<Tensor<1>>,
    /// The number of steps that are kept.
    len: usize,
    /// Whether the scale follows the largest of all steps, not the last.
    of_all: bool,
}

impl AmaxHistory {
    /// A history of `len` steps without any. The scale follows the largest magnitude of all steps
    /// (`of_all`, Transformer Engine's `max`) or the last (`most_recent`).
    pub fn new(len: usize, of_all: bool) -> Self {
        Self(Arc::new(Mutex::new(History {
            steps: None,
            derived: None,
            current: None,
            len: len.max(1),
            of_all,
        })))
    }

    /// Records the largest magnitude of a matrix, and returns that which its scale is derived from.
    fn exchange(&self, found: Tensor<1>) -> Tensor<1> {
        let mut history = self.lock();
        let current = history.current.take();
        history.current = Some(match current {
            Some(largest) => largest.max_pair(found.clone()),
            None => found.clone(),
        });
        history.derived.clone().unwrap_or(found)
    }

    /// The largest magnitude of the current step, `[1]`, if a matrix was quantised in it.
    pub fn current(&self) -> Option<Tensor<1>> {
        self.lock().current.clone()
    }

    /// Ends the step with `amax`, `[1]`, that of all ranks and micro-batches.
    pub fn advance(&self, amax: Tensor<1>) {
        let steps = match self.steps() {
            Some(steps) => Tensor::cat(vec![steps, amax], 0),
            None => amax,
        };
        self.set_steps(steps);
    }

    /// The largest magnitudes of the last steps, the oldest first, `[steps]`.
    pub fn steps(&self) -> Option<Tensor<1>> {
        self.lock().steps.clone()
    }

    /// Replaces the steps, as a resumed run does, and begins a new step. Only the last ones are
    /// kept.
    ///
    /// # Shapes
    /// - `steps`: `[steps]`
    pub fn set_steps(&self, steps: Tensor<1>) {
        let mut history = self.lock();
        let [num_steps] = steps.dims();
        let kept = num_steps.min(history.len);
        let steps = steps.narrow(0, num_steps - kept, kept);
        history.current = None;
        history.derived = Some(if history.of_all {
            steps.clone().max()
        } else {
            steps.clone().narrow(0, kept - 1, 1)
        });
        history.steps = Some(steps);
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_autograd::testing::values;

    use super::*;

    #[test]
    fn scales_follow_the_steps_before() {
        let amax = |x: f32| Tensor::<1>::from_floats([x], &Device::flex());
        for (of_all, expected) in [(true, [3.0, 3.0, 3.0, 2.0]), (false, [3.0, 3.0, 1.0, 2.0])] {
            let history = AmaxHistory::new(2, of_all);
            let mut found = Vec::new();
            for step in [3.0, 1.0, 2.0, 5.0] {
                found.extend(values(history.exchange(amax(step))));
                history.exchange(amax(step / 2.0));
                let largest = history.current().unwrap();
                assert_eq!(values(largest.clone()), [f64::from(step)]);
                history.advance(largest);
            }
            assert_eq!(found, expected);
            assert_eq!(values(history.steps().unwrap()), [2.0, 5.0]);
        }
    }
}

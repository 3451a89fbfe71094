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
    /// `reduce`: `[n]` to `[n]`, f32 without autodiff; `n` is 1, or 2 with a Hadamard transform, or the
    /// number of matrices that are quantised [together](crate::GroupedOptions::quantizations)
    pub fn new(reduce: impl Fn(Tensor<1>) -> Tensor<1> + Send + Sync + 'static) -> Self {
        Self(Arc::new(reduce))
    }

    /// The largest magnitudes over the ranks, given those of this rank.
    ///
    /// # Shapes
    /// `[n]`, unchanged
    /// # Collective
    /// All ranks that share the matrices.
    pub fn reduced(&self, amaxes: Tensor<1>) -> Tensor<1> {
        (self.0)(amaxes)
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
    Delayed(DelayedAmax),
}

impl Default for AmaxSource {
    fn default() -> Self {
        Self::Current(None)
    }
}

impl AmaxSource {
    /// The largest magnitude to derive the scale of `x` from, in the shape of that of `x`.
    pub(super) fn of<B: IntoPrimitive>(
        &self,
        x: FloatTensor<B>,
        largest_magnitude: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let found = largest_magnitude(x);
        match self {
            Self::Current(None) => found,
            Self::Current(Some(reduction)) => B::unwrap(reduction.reduced(B::wrap(found))),
            Self::Delayed(delayed) => B::unwrap(delayed.exchange(B::wrap(found))),
        }
    }

    /// The largest magnitudes to derive the scales of several matrices from, given their own: `[n]`
    /// for as many sources of one kind. A reduction is called once for all, that of the first
    /// source; those of delayed scaling in every pass, because the matrices of another rank may
    /// have no step before while those of this rank have one.
    pub(super) fn of_all(sources: &[&Self], found: Tensor<1>) -> Tensor<1> {
        match sources[0] {
            Self::Current(None) => found,
            Self::Current(Some(reduction)) => reduction.reduced(found),
            Self::Delayed(_) => {
                let delayed = sources.iter().filter_map(|source| match source {
                    Self::Delayed(delayed) => Some(delayed),
                    Self::Current(_) => None,
                });
                DelayedAmax::exchange_all(&delayed.collect::<Vec<_>>(), found)
            }
        }
    }

    /// The same source for a pass that is not trained on: delayed scaling records nothing.
    pub(super) fn without_record(&self) -> Self {
        match self {
            Self::Current(reduction) => Self::Current(reduction.clone()),
            Self::Delayed(delayed) => Self::Delayed(DelayedAmax {
                records: false,
                ..delayed.clone()
            }),
        }
    }
}

/// A matrix of delayed scaling: the largest magnitude that its scale is derived from, and the one
/// that it has in the current step. Clones share all state. The trainer keeps the history.
///
/// As long as there is no step before, the scale is derived from the matrix itself, over all ranks
/// that hold a part of it.
///
/// Source: Transformer Engine, `DelayedScaling`.
#[derive(Clone, Debug)]
pub struct DelayedAmax {
    state: Arc<Mutex<DelayedState>>,
    reduction: Option<AmaxReduction>,
    records: bool,
}

#[derive(Debug, Default)]
struct DelayedState {
    /// The magnitude that the scale is derived from, `[1]`.
    derived: Option<Tensor<1>>,
    /// The largest magnitude so far in the current step, `[1]`.
    current: Option<Tensor<1>>,
}

impl DelayedAmax {
    /// A matrix without a step before, of which other ranks hold parts if there is a reduction.
    pub fn new(reduction: Option<AmaxReduction>) -> Self {
        Self {
            state: Arc::default(),
            reduction,
            records: true,
        }
    }

    /// The same matrix, with another reduction over the ranks that hold parts of it.
    #[must_use]
    pub fn reduced_by(&self, reduction: Option<AmaxReduction>) -> Self {
        Self {
            reduction,
            ..self.clone()
        }
    }

    /// Records the largest magnitude of a matrix, and returns that which its scale is derived from:
    /// NaN if the matrix has an element that is not finite, which a scale of other steps would hide.
    fn exchange(&self, found: Tensor<1>) -> Tensor<1> {
        let derived = {
            let mut state = self.lock();
            if self.records {
                let current = state.current.take();
                state.current = Some(match current {
                    Some(largest) => largest.max_pair(found.clone()),
                    None => found.clone(),
                });
            }
            state.derived.clone()
        };
        match (derived, &self.reduction) {
            (Some(derived), _) => derived + (found.clone() - found),
            (None, Some(reduction)) => reduction.reduced(found),
            (None, None) => found,
        }
    }

    /// As [`exchange`](Self::exchange), for several matrices.
    fn exchange_all(all: &[&Self], found: Tensor<1>) -> Tensor<1> {
        let of = |index: usize| found.clone().narrow(0, index, 1);
        let mut derived = Vec::new();
        let mut before = Vec::new();
        for delayed in all {
            let mut state = delayed.lock();
            derived.push(state.derived.clone());
            before.push(if delayed.records {
                state.current.take()
            } else {
                None
            });
        }
        if all[0].records {
            let largest = joined(before, of).map_or(found.clone(), |x| x.max_pair(found.clone()));
            for (index, delayed) in all.iter().enumerate() {
                delayed.lock().current = Some(largest.clone().narrow(0, index, 1));
            }
        }
        let own = match &all[0].reduction {
            Some(reduction) => reduction.reduced(found.clone()),
            None => found.clone(),
        };
        let derived = joined(derived, |index| own.clone().narrow(0, index, 1));
        derived.map_or(own.clone(), |derived| derived + (found.clone() - found))
    }

    /// The largest magnitude of the matrix in the current step so far, `[1]`, on this rank, if it
    /// was recorded.
    pub fn current(&self) -> Option<Tensor<1>> {
        self.lock().current.clone()
    }

    /// Ends the step: returns the largest magnitude of the matrix in it, `[1]`, on this rank, if it
    /// was recorded.
    pub fn take_current(&self) -> Option<Tensor<1>> {
        self.lock().current.take()
    }

    /// Sets the magnitude that scales are derived from, `[1]`; `None` if there is no step before.
    pub fn set_derived(&self, amax: Option<Tensor<1>>) {
        self.lock().derived = amax;
    }

    fn lock(&self) -> MutexGuard<'_, DelayedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers one after the other, with others where there are none; `None` if there are none at all.
fn joined(
    numbers: Vec<Option<Tensor<1>>>,
    others: impl Fn(usize) -> Tensor<1>,
) -> Option<Tensor<1>> {
    if numbers.iter().all(Option::is_none) {
        return None;
    }
    let numbers = numbers.into_iter().enumerate();
    let numbers = numbers.map(|(index, number)| number.unwrap_or_else(|| others(index)));
    Some(Tensor::cat(numbers.collect(), 0))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_autograd::testing::values;

    use super::*;

    fn amax(x: f32) -> Tensor<1> {
        Tensor::from_floats([x], &Device::flex())
    }

    #[test]
    fn scales_follow_the_magnitude_that_was_set() {
        let delayed = DelayedAmax::new(None);
        assert!(delayed.take_current().is_none());
        assert_eq!(values(delayed.exchange(amax(3.0))), [3.0]);
        assert_eq!(values(delayed.exchange(amax(1.0))), [1.0]);
        assert_eq!(values(delayed.take_current().unwrap()), [3.0]);
        delayed.set_derived(Some(amax(7.0)));
        let source = AmaxSource::Delayed(delayed.clone());
        let AmaxSource::Delayed(silent) = source.without_record() else {
            unreachable!("the source keeps its kind");
        };
        assert_eq!(values(silent.exchange(amax(9.0))), [7.0]);
        assert!(
            delayed.take_current().is_none(),
            "an evaluation is recorded"
        );
        assert_eq!(values(delayed.exchange(amax(5.0))), [7.0]);
        assert_eq!(values(delayed.take_current().unwrap()), [5.0]);
    }

    #[test]
    fn the_first_step_shares_its_own_magnitude() {
        let reduction = AmaxReduction::new(|own| own.max_pair(amax(4.0)));
        let delayed = DelayedAmax::new(Some(reduction));
        assert_eq!(values(delayed.exchange(amax(3.0))), [4.0]);
        assert_eq!(values(delayed.take_current().unwrap()), [3.0]);
    }

    #[test]
    fn a_magnitude_that_is_not_finite_is_not_hidden() {
        let delayed = DelayedAmax::new(None);
        delayed.set_derived(Some(amax(7.0)));
        for broken in [f32::INFINITY, f32::NAN] {
            assert!(values(delayed.exchange(amax(broken)))[0].is_nan());
        }
    }
}

//! Selective save: the output of attention is kept inside regions that are recomputed.
//!
//! The checkpoint wrapper and the attention inside it are unaware of each other. Saved results
//! travel through a thread-local of the thread that computes the region, as
//! [`LinearPass`](megaburn_autograd::LinearPass) does in the kernels.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use megaburn_kernels::PartialAttention;

thread_local! {
    static SAVES_ATTENTION: Cell<bool> = const { Cell::new(false) };
    /// Saved attention outputs of the region that runs, or is recomputed, on this thread.
    static SAVED_ATTENTION: RefCell<Option<(Results, RecomputePhase)>> = const { RefCell::new(None) };
}

/// The output of each attention, in order of computation.
type Results = Arc<Mutex<VecDeque<PartialAttention>>>;

#[derive(Clone, Copy, Debug)]
enum RecomputePhase {
    Forward,
    Recompute,
}

/// In regions that `make` [recomputes](crate::recomputed) on this thread, saves the output of
/// attention and its log-sum-exps. Backward recomputes everything else and uses the saved ones.
///
/// - This costs as much memory as the output of attention, for each layer.
/// - It saves the computation that grows with the square of the sequence length and, with context
///   parallelism, one exchange of keys and values.
/// - Without a fused kernel (e.g. on GPUs in f32), attention is then computed in parts, which is
///   slower.
///
/// Source: PyTorch's selective activation checkpointing, as torchtitan uses it
/// (`torchtitan/distributed/activation_checkpoint.py`).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use megaburn_collective::Group;
/// use megaburn_parallel::{SelfAttentionConfig, save_attention_output, recomputed};
///
/// let device = Device::flex().autodiff();
/// let config = SelfAttentionConfig::new(8, 2, 2, 4).with_name("attention");
/// let layer = config.init(&Group::single(0), &device)?;
/// let x = Tensor::<3>::ones([4, 2, 8], &device).require_grad();
/// let [y] = save_attention_output(|| {
///     recomputed(&layer, [x.clone().into()], |layer, [x]| [layer.forward(x, None)])
/// });
/// assert!(x.grad(&y.sum().backward()).is_some());
/// # Ok::<_, megaburn_parallel::ParallelError>(())
/// ```
pub fn save_attention_output<T>(make: impl FnOnce() -> T) -> T {
    let _before = RestoreOnDrop(Some(SAVES_ATTENTION.replace(true)), |before| {
        SAVES_ATTENTION.set(before)
    });
    make()
}

/// The saved attention outputs of one region.
pub(crate) struct SelectiveSave(Option<Results>);

impl SelectiveSave {
    /// An empty list inside of [`save_attention_output`]; otherwise nothing is saved.
    pub(crate) fn if_selective() -> Self {
        Self(SAVES_ATTENTION.get().then(Results::default))
    }

    /// Runs the region for the first time, and saves.
    pub(crate) fn first<T>(&self, compute: impl FnOnce() -> T) -> T {
        self.during(RecomputePhase::Forward, compute)
    }

    /// Recomputes the region with the saved outputs.
    pub(crate) fn again<T>(self, compute: impl FnOnce() -> T) -> T {
        self.during(RecomputePhase::Recompute, compute)
    }

    fn during<T>(&self, time: RecomputePhase, compute: impl FnOnce() -> T) -> T {
        let here = self.0.clone().map(|results| (results, time));
        let _before = RestoreOnDrop(Some(SAVED_ATTENTION.replace(here)), |before| {
            drop(SAVED_ATTENTION.replace(before))
        });
        compute()
    }
}

/// Whether the output of attention is saved here.
pub(crate) fn is_attention_saved() -> bool {
    SAVED_ATTENTION.with_borrow(Option::is_some)
}

/// The result of `compute` or, in a recompute, its saved result.
pub(crate) fn saved_attention(compute: impl FnOnce() -> PartialAttention) -> PartialAttention {
    let Some((results, time)) = SAVED_ATTENTION.with_borrow(Option::clone) else {
        return compute();
    };
    let results = || results.lock().unwrap_or_else(PoisonError::into_inner);
    match time {
        RecomputePhase::Forward => {
            let part = compute();
            results().push_back(part.clone());
            part
        }
        RecomputePhase::Recompute => results()
            .pop_front()
            .expect("recompute saves as many tensors as the first forward pass"),
    }
}

/// Restores the previous value, also on panic.
struct RestoreOnDrop<T>(Option<T>, fn(T));

impl<T> Drop for RestoreOnDrop<T> {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            self.1(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::tensor::{Device, Tensor};

    use super::*;

    fn part(value: f32) -> PartialAttention {
        let device = Device::flex();
        let [out, lse] = [value, -value].map(|value| Tensor::<1>::full([6], value, &device));
        PartialAttention {
            out: out.reshape([3, 1, 1, 2]),
            lse: lse.reshape([1, 1, 6]),
        }
    }

    fn value(part: PartialAttention) -> f32 {
        assert!(part.lse.into_data().iter::<f32>().all(|x| x < 0.0));
        part.out.into_data().iter::<f32>().next().unwrap()
    }

    /// Two attentions of one region.
    fn both(values: [f32; 2]) -> [f32; 2] {
        values.map(|of| value(saved_attention(|| part(of))))
    }

    #[test]
    fn what_is_kept_is_not_computed_again() {
        let kept = save_attention_output(SelectiveSave::if_selective);
        let others = save_attention_output(SelectiveSave::if_selective);
        assert_eq!(kept.first(|| both([1.0, 2.0])), [1.0, 2.0]);
        assert_eq!(others.first(|| both([5.0, 6.0])), [5.0, 6.0]);
        let never = || both([f32::NAN; 2]);
        assert_eq!(kept.again(never), [1.0, 2.0]);
        assert_eq!(others.again(never), [5.0, 6.0]);
    }

    #[test]
    fn nothing_is_kept_that_is_not_wanted() {
        let plain = SelectiveSave::if_selective();
        let outer = save_attention_output(SelectiveSave::if_selective);
        outer.first(|| {
            assert!(is_attention_saved());
            assert_eq!(
                plain.first(|| (is_attention_saved(), both([1.0, 2.0]))),
                (false, [1.0, 2.0])
            );
            assert!(is_attention_saved());
        });
        assert_eq!(plain.again(|| both([3.0, 4.0])), [3.0, 4.0]);
        assert!(!is_attention_saved());
    }

    #[test]
    fn who_panics_leaves_nothing_behind() {
        let kept = save_attention_output(SelectiveSave::if_selective);
        let panics = || save_attention_output(|| kept.first(|| panic!("on purpose")));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert!(!is_attention_saved() && SelectiveSave::if_selective().0.is_none());
    }
}

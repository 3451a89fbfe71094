//! Quantised weights that are used for several passes.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::operands::Quantized;

/// Tells the layers of a model when their weights do not change, so that each quantises its weight
/// once: for both passes, and for all micro-batches of a step. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct WeightSpan(Arc<Span>);

#[derive(Debug, Default)]
struct Span {
    /// The number of the current time, or `NONE`.
    current: AtomicU64,
    /// The weights of the model's layers.
    slots: Mutex<Vec<Weak<Slot>>>,
}

/// While it lives, no weight of the model changes. Dropping it releases the quantised weights.
#[derive(Debug)]
#[must_use = "weights are quantised for every pass once it is dropped"]
pub struct UnchangedWeights(Arc<Span>);

/// The number of a time when weights may change.
const NONE: u64 = 0;

impl WeightSpan {
    /// Begins a time without changes, which ends when the result is dropped.
    pub fn unchanged(&self) -> UnchangedWeights {
        static NEXT: AtomicU64 = AtomicU64::new(NONE + 1);
        let span = NEXT.fetch_add(1, Ordering::Relaxed);
        self.0.current.store(span, Ordering::Relaxed);
        UnchangedWeights(self.0.clone())
    }

    /// The number of the current time, if weights do not change in it.
    fn current(&self) -> Option<u64> {
        Some(self.0.current.load(Ordering::Relaxed)).filter(|span| *span != NONE)
    }
}

impl Drop for UnchangedWeights {
    fn drop(&mut self) {
        self.0.current.store(NONE, Ordering::Relaxed);
        let mut slots = lock(&self.0.slots);
        slots.retain(|slot| slot.upgrade().is_some_and(|slot| slot.release()));
    }
}

/// The quantised weight of a layer, kept while weights do not change. Clones share it.
#[derive(Clone)]
pub struct KeptWeight {
    span: WeightSpan,
    slot: Arc<Slot>,
}

#[derive(Default)]
struct Slot(Mutex<Option<Kept>>);

struct Kept {
    span: u64,
    operands: Box<dyn Any + Send>,
}

impl KeptWeight {
    /// The weight of a layer in a model.
    pub fn new(model: &WeightSpan) -> Self {
        let slot = Arc::default();
        lock(&model.0.slots).push(Arc::downgrade(&slot));
        Self {
            span: model.clone(),
            slot,
        }
    }

    /// Whether weights do not change now.
    pub(super) fn is_kept(&self) -> bool {
        self.span.current().is_some()
    }

    /// The operands of the current time, which the first call makes.
    pub(super) fn get<Q: Clone + Send + 'static>(
        &self,
        make: impl FnOnce() -> Quantized<Q>,
    ) -> Quantized<Q> {
        let span = self.span.current();
        let mut kept = lock(&self.slot.0);
        let current = kept.as_ref().filter(|kept| Some(kept.span) == span);
        let known = current.and_then(|kept| kept.operands.downcast_ref::<Quantized<Q>>());
        if let Some(known) = known {
            return known.clone();
        }
        let made = make();
        *kept = span.map(|span| Kept {
            span,
            operands: Box::new(made.clone()),
        });
        made
    }
}

impl Slot {
    /// Releases the operands. The slot itself stays.
    fn release(&self) -> bool {
        *lock(&self.0) = None;
        true
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for KeptWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptWeight").finish_non_exhaustive()
    }
}

//! Quantised weights that are used for several passes.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::operands::Quantized;

/// Tells the layers of a model when their weights do not change, so that each quantises its weight
/// once: for both passes, and for all micro-batches of a step. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct WeightSpan(Arc<AtomicU64>);

/// While it lives, no weight of the model changes.
#[derive(Debug)]
#[must_use = "weights are quantised for every pass once it is dropped"]
pub struct UnchangedWeights(Arc<AtomicU64>);

/// The number of a time when weights may change.
const NONE: u64 = 0;

impl WeightSpan {
    /// Begins a time without changes, which ends when the result is dropped.
    pub fn unchanged(&self) -> UnchangedWeights {
        static NEXT: AtomicU64 = AtomicU64::new(NONE + 1);
        let span = NEXT.fetch_add(1, Ordering::Relaxed);
        self.0.store(span, Ordering::Relaxed);
        UnchangedWeights(self.0.clone())
    }

    /// The number of the current time, if weights do not change in it.
    fn current(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|span| *span != NONE)
    }
}

impl Drop for UnchangedWeights {
    fn drop(&mut self) {
        self.0.store(NONE, Ordering::Relaxed);
    }
}

/// The quantised weight of a layer, kept while weights do not change. Clones share it.
#[derive(Clone)]
pub struct KeptWeight {
    span: WeightSpan,
    kept: Arc<Mutex<Option<Kept>>>,
}

struct Kept {
    span: u64,
    operands: Box<dyn Any + Send>,
}

impl KeptWeight {
    /// The weight of a layer in a model.
    pub fn new(model: &WeightSpan) -> Self {
        Self {
            span: model.clone(),
            kept: Arc::default(),
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
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let current = kept.as_ref().filter(|kept| Some(kept.span) == span);
        let known = current.and_then(|kept| kept.operands.downcast_ref::<Quantized<Q>>());
        if let Some(known) = known {
            return known.clone();
        }
        // Operands from before make room first.
        *kept = None;
        let made = make();
        *kept = span.map(|span| Kept {
            span,
            operands: Box::new(made.clone()),
        });
        made
    }
}

impl fmt::Debug for KeptWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptWeight").finish_non_exhaustive()
    }
}

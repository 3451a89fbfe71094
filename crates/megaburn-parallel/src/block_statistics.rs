//! Statistics of what the blocks of a model compute while it trains.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use megaburn_kernels::{ElementSums, PendingSums};

use crate::residual::Residual;

/// Sums over the residual stream after each block of this rank, over several micro-batches. Clones
/// add to the same sums.
#[derive(Clone, Debug, Default)]
pub struct BlockStatistics(Arc<Sums>);

#[derive(Debug, Default)]
struct Sums {
    /// Set during the forward pass of a stage: what backward computes again is not counted twice.
    is_forward: AtomicBool,
    found: Mutex<BTreeMap<usize, Vec<PendingSums>>>,
}

/// Counts what blocks compute until it is dropped.
#[derive(Debug)]
#[must_use = "blocks are counted until this is dropped"]
pub struct CountedForward(BlockStatistics);

impl Drop for CountedForward {
    fn drop(&mut self) {
        self.0.0.is_forward.store(false, Ordering::Relaxed);
    }
}

impl BlockStatistics {
    /// Begins the forward pass of a stage.
    pub fn forward(&self) -> CountedForward {
        self.0.is_forward.store(true, Ordering::Relaxed);
        CountedForward(self.clone())
    }

    /// Adds the stream after `block`, if this is a forward pass.
    pub fn add(&self, block: usize, x: &Residual) {
        if self.0.is_forward.load(Ordering::Relaxed) {
            let sums = PendingSums::of(x.peek());
            self.lock().entry(block).or_default().push(sums);
        }
    }

    /// Takes the sums by block. Waits for the device.
    ///
    /// # Errors
    /// The device cannot be read; the error is its message.
    pub fn take(&self) -> Result<BTreeMap<usize, ElementSums>, String> {
        let found = std::mem::take(&mut *self.lock());
        let of_block = |(block, pending): (usize, Vec<PendingSums>)| {
            let mut all = ElementSums::default();
            PendingSums::read(&pending)?
                .into_iter()
                .for_each(|sums| all.add(sums));
            Ok((block, all))
        };
        found.into_iter().map(of_block).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<PendingSums>>> {
        self.0.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

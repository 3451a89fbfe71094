//! Products that give weights their gradients, computed later than the backward that they are of.

use std::collections::BTreeMap;

use megaburn_kernels::{Spare, WgradQueue};
use tracing::debug;

use super::MicroBatchStep;

/// Those of a rank: where the schedule splits backwards, and, if it shall be so, where passes wait.
#[derive(Debug, Default)]
pub(super) struct DeferredWgrads {
    /// Whether they are computed beside waits.
    beside: bool,
    /// The oldest first.
    of_passes: Vec<(MicroBatchStep, WgradQueue)>,
    /// How often the last forward and the last backward of a chunk waited.
    waits: BTreeMap<usize, [usize; 2]>,
    /// What a wait is worth, as [`Spare::share`]: so much that all waits of a forward and a backward together take
    /// all products of a backward. 0 before one has shown that, in each step anew: a run that is resumed then
    /// does what it would have done.
    share: u64,
}

impl DeferredWgrads {
    pub(super) fn new(beside: bool) -> Self {
        Self {
            beside,
            ..Self::default()
        }
    }

    /// Behind the last pass.
    pub(super) fn end(self) {
        assert!(self.of_passes.is_empty(), "gradients that nobody computed");
        if self.share > 0 {
            debug!(
                "weights' gradients were computed beside waits, {} elements beside each of {:?}",
                self.share, self.waits
            );
        }
    }

    /// Those of a backward.
    pub(super) fn take(&mut self, of: MicroBatchStep) -> Option<WgradQueue> {
        let is_it = |(pass, _): &(MicroBatchStep, _)| {
            (pass.chunk, pass.micro_batch) == (of.chunk, of.micro_batch)
        };
        let index = self.of_passes.iter().position(is_it)?;
        Some(self.of_passes.remove(index).1)
    }

    /// All that are left, and what they are of.
    pub(super) fn take_left(&mut self) -> Vec<(MicroBatchStep, WgradQueue)> {
        let mut left = std::mem::take(&mut self.of_passes);
        left.retain(|(_, work)| !work.is_empty());
        left
    }

    /// Whether those of a backward that the schedule has now can be computed beside what a forward waits for.
    pub(super) fn can_stay(&self, pass: MicroBatchStep) -> bool {
        !pass.is_last && self.share > 0 && self.waits.values().any(|[forward, _]| *forward > 0)
    }

    /// Runs a forward.
    pub(super) fn forward<T>(&mut self, pass: MicroBatchStep, run: impl FnOnce() -> T) -> T {
        if !self.beside {
            return run();
        }
        let (done, waits) = self.spare().beside_waits_of(run);
        self.waits.entry(pass.chunk).or_default()[0] = waits;
        done
    }

    /// Runs a backward, one that the schedule splits or a whole one.
    pub(super) fn backward<T>(
        &mut self,
        pass: MicroBatchStep,
        is_split: bool,
        run: impl FnOnce() -> T,
    ) -> T {
        let work = WgradQueue::default();
        if is_split || self.share > 0 && !pass.is_last {
            self.of_passes.push((pass, work.clone()));
        }
        if !self.beside || pass.is_last {
            return if is_split { work.defer(run) } else { run() };
        }
        let is_deferred = is_split || self.share > 0;
        let (done, backward) = self.spare().beside_waits_of(|| {
            if is_deferred {
                work.defer(run)
            } else {
                work.measure(run)
            }
        });
        let waits = self.waits.entry(pass.chunk).or_default();
        waits[1] = backward;
        if let Some(share) = work.size().checked_div(waits.iter().sum::<usize>() as u64) {
            self.share = share.max(1);
        }
        done
    }

    /// What may be computed in a pass that is not the last: not what last passes give.
    fn spare(&self) -> Spare {
        let others = self.of_passes.iter().filter(|(pass, _)| !pass.is_last);
        let put_off = others.map(|(_, work)| work.clone()).collect();
        Spare {
            put_off,
            share: self.share,
        }
    }
}

//! Products that give weights their gradients, computed later than the backward that they are of.

use std::collections::BTreeMap;

use megaburn_kernels::{Spare, WeightGradients};

use super::Pass;

/// Those of a rank: where the schedule splits backwards, and, if it shall be so, where passes wait.
#[derive(Debug, Default)]
pub(super) struct PutOff {
    /// Whether they are computed beside waits.
    beside: bool,
    /// The oldest first.
    of_passes: Vec<(Pass, WeightGradients)>,
    /// How often the last forward and the last backward of a chunk waited.
    waits: BTreeMap<usize, [usize; 2]>,
    /// What a wait is worth, as [`Spare::share`]: so much that all waits of a forward and a backward together take
    /// all products of a backward.
    share: u64,
}

impl PutOff {
    pub(super) fn new(beside: bool) -> Self {
        Self { beside, ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of_passes.is_empty()
    }

    /// Those of a backward.
    pub(super) fn take(&mut self, of: Pass) -> Option<WeightGradients> {
        let is_it =
            |(pass, _): &(Pass, _)| (pass.chunk, pass.micro_batch) == (of.chunk, of.micro_batch);
        let index = self.of_passes.iter().position(is_it)?;
        Some(self.of_passes.remove(index).1)
    }

    /// All that are left, and what they are of.
    pub(super) fn take_left(&mut self) -> Vec<(Pass, WeightGradients)> {
        let mut left = std::mem::take(&mut self.of_passes);
        left.retain(|(_, work)| !work.is_empty());
        left
    }

    /// Whether those of a backward that the schedule has now can be computed beside what a forward waits for.
    pub(super) fn can_stay(&self, pass: Pass) -> bool {
        let waits = |waits: &[usize; 2]| waits[0] > 0;
        self.beside && !pass.is_last && self.waits.values().any(waits)
    }

    /// Runs a forward.
    pub(super) fn forward<T>(&mut self, pass: Pass, run: impl FnOnce() -> T) -> T {
        if !self.beside {
            return run();
        }
        let (done, waits) = self.spare().beside_waits_of(run);
        self.waits.entry(pass.chunk).or_default()[0] = waits;
        done
    }

    /// Runs a backward, one that the schedule splits or a whole one.
    pub(super) fn backward<T>(&mut self, pass: Pass, is_split: bool, run: impl FnOnce() -> T) -> T {
        let [forward, backward] = self.waits.get(&pass.chunk).copied().unwrap_or_default();
        let waits = self.beside && !pass.is_last && forward + backward > 0;
        let work = WeightGradients::default();
        if !waits {
            if !is_split {
                return run();
            }
            self.of_passes.push((pass, work.clone()));
            return work.defer(run);
        }
        self.of_passes.push((pass, work.clone()));
        let (done, backward) = self.spare().beside_waits_of(|| work.defer(run));
        self.waits.insert(pass.chunk, [forward, backward]);
        self.share = work.size().div_ceil((forward + backward) as u64);
        done
    }

    /// What may be computed in a pass that is not the last: not what last passes give.
    fn spare(&self) -> Spare {
        let others = self.of_passes.iter().filter(|(pass, _)| !pass.is_last);
        let put_off = others.map(|(_, work)| work.clone()).collect();
        Spare { put_off, share: self.share }
    }
}

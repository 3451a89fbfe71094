//! Work that a rank does for the first time on a GPU compiles its kernels, separately on each rank.

use std::sync::atomic::{AtomicBool, Ordering};

use megaburn_collective::{Group, Phase, PhaseGuard};

/// Work between the steps that has its own kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Evaluation,
    Replicas,
    Sample,
}

/// The kinds of work that this rank has begun. Nothing is compiled on a CPU.
#[derive(Debug, Default)]
pub(crate) struct FirstTimes {
    compiles: bool,
    begun: [AtomicBool; 3],
}

impl FirstTimes {
    /// For a rank that compiles kernels (`compiles`), or one that does not.
    pub(crate) fn new(compiles: bool) -> Self {
        Self {
            compiles,
            ..Self::default()
        }
    }

    /// Marks the first time of this work as part of the start phase, whose limit then applies to
    /// ranks that wait for this one. The guard must be held during the work.
    pub(crate) fn begin(&self, work: Work, world: &Group) -> Option<PhaseGuard> {
        let begun = self.begun[work as usize].swap(true, Ordering::Relaxed);
        (self.compiles && !begun).then(|| world.phase(Phase::Start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_time_on_a_gpu_belongs_to_the_start() {
        let world = Group::single(0);
        let phase = || world.pulse().quiet().unwrap().phase;
        let on_gpu = FirstTimes::new(true);
        for work in [Work::Evaluation, Work::Replicas, Work::Sample] {
            let first = on_gpu.begin(work, &world);
            assert_eq!(phase(), Some(Phase::Start), "{work:?}");
            drop(first);
            assert_eq!(phase(), None);
            assert!(on_gpu.begin(work, &world).is_none());
            assert!(FirstTimes::new(false).begin(work, &world).is_none());
        }
    }
}

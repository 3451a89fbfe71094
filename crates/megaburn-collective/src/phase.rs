//! How a rank announces long work, and how its progress is watched.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    activity::{Activity, Quiet},
    busy::Phase,
    group::Group,
};

impl Group {
    /// Declares that this rank is in `phase` until the returned guard is dropped. Ranks that wait
    /// for it in a collective keep waiting beyond
    /// [`GroupOptions::timeout`](crate::GroupOptions::timeout) as long as it makes progress; the
    /// phase's limit applies to the time without progress. A rank that is stopped or dead is still
    /// noticed within the timeout of collectives, because it does not answer.
    pub fn phase(&self, phase: Phase) -> PhaseGuard {
        let activity = self.0.activity.clone();
        let id = activity.enter(phase);
        PhaseGuard {
            progress: Progress(Target::Phase(activity, id)),
        }
    }

    /// A handle for reporting that this rank is alive.
    pub fn pulse(&self) -> Pulse {
        Pulse(self.0.activity.clone())
    }
}

/// A phase that a rank is in. It ends when this is dropped.
#[derive(Debug)]
pub struct PhaseGuard {
    progress: Progress,
}

impl PhaseGuard {
    /// Reports the progress of this phase. Clones may move to other threads.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for PhaseGuard {
    fn drop(&mut self) {
        if let Target::Phase(activity, id) = &self.progress.0 {
            activity.leave(*id);
        }
    }
}

/// Records progress in a phase of a rank.
#[derive(Clone, Default)]
pub struct Progress(Target);

#[derive(Clone, Default)]
enum Target {
    #[default]
    None,
    Phase(Arc<Activity>, u64),
    Counter(Arc<AtomicU64>),
}

impl Progress {
    /// Progress of work outside a run, which no rank waits for.
    pub fn none() -> Self {
        Self(Target::None)
    }

    /// Progress of work outside of phases: the bytes are added to `counter`. A rank that waits for
    /// the work in a phase reports them.
    pub fn counter(counter: Arc<AtomicU64>) -> Self {
        Self(Target::Counter(counter))
    }

    /// Adds to the number of bytes that are to be read or written.
    pub fn expect(&self, bytes: u64) {
        if let Target::Phase(activity, id) = &self.0 {
            activity.expect(*id, bytes);
        }
    }

    /// Adds to the number of bytes that were read or written; 0 counts as progress too.
    pub fn add(&self, bytes: u64) {
        match &self.0 {
            Target::None => {}
            Target::Phase(activity, id) => activity.progress(*id, bytes),
            Target::Counter(counter) => {
                counter.fetch_add(bytes, Ordering::Relaxed);
            }
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// Signs of life of one rank. Collectives and phases report some; a training loop reports one for
/// each micro-batch of a step or an evaluation, and one for each tensor that it reads.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Activity>);

impl Pulse {
    /// Records that the rank finished a piece of work. Within a phase, that counts as progress of
    /// the phase.
    pub fn beat(&self) {
        self.0.advance();
    }

    /// How long the rank has given no sign of life; `None` while it waits in a collective.
    pub fn quiet(&self) -> Option<Quiet> {
        self.0.quiet()
    }
}

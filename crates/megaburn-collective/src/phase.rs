//! How a rank says that it works on something long, and how it is watched.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    Group,
    activity::{Activity, Quiet},
    busy::Phase,
};

impl Group {
    /// Says that this rank is in `phase` until what this returns is dropped. Ranks that wait for it
    /// in a collective go on waiting beyond [`GroupOptions::timeout`](crate::GroupOptions::timeout)
    /// as long as it makes progress. The phase's limit holds for the time without progress.
    /// A rank that is stopped or dead is still noticed within the timeout of collectives, because
    /// it does not answer.
    pub fn phase(&self, phase: Phase) -> PhaseGuard {
        let activity = self.0.activity.clone();
        let id = activity.enter(phase);
        PhaseGuard {
            progress: Progress(Some((activity, id))),
        }
    }

    /// A handle on the signs of life of this rank.
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
    /// What reports the progress of this phase. Clones may go to other threads.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for PhaseGuard {
    fn drop(&mut self) {
        if let Some((activity, id)) = &self.progress.0 {
            activity.leave(*id);
        }
    }
}

/// Takes note of progress in a phase of a rank.
#[derive(Clone, Default)]
pub struct Progress(Option<(Arc<Activity>, u64)>);

impl Progress {
    /// Progress that nobody waits for: of work outside a run.
    pub fn none() -> Self {
        Self(None)
    }

    /// So many more bytes are to be read or written.
    pub fn expect(&self, bytes: u64) {
        if let Some((activity, id)) = &self.0 {
            activity.expect(*id, bytes);
        }
    }

    /// So many more bytes are read or written; 0 is progress too.
    pub fn add(&self, bytes: u64) {
        if let Some((activity, id)) = &self.0 {
            activity.progress(*id, bytes);
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// The signs of life of one rank. Collectives and phases give some; a training loop gives one for
/// each micro-batch of a step or an evaluation, and one for each tensor that it reads.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Activity>);

impl Pulse {
    /// The rank has finished a piece of its work. In a phase, that counts as progress of the phase.
    pub fn beat(&self) {
        self.0.advance();
    }

    /// How long it has given no sign; `None` while it waits in a collective.
    pub fn quiet(&self) -> Option<Quiet> {
        self.0.quiet()
    }
}

/// How long a rank may be without progress in each phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseLimits {
    /// Of [`Phase::Start`].
    pub start: Duration,
    /// Of [`Phase::Save`].
    pub save: Duration,
    /// Of [`Phase::Load`].
    pub load: Duration,
}

impl PhaseLimits {
    /// The limit of one.
    pub fn of(&self, phase: Phase) -> Duration {
        match phase {
            Phase::Start => self.start,
            Phase::Save => self.save,
            Phase::Load => self.load,
        }
    }
}

impl Default for PhaseLimits {
    /// Ten minutes each.
    fn default() -> Self {
        let ten_minutes = Duration::from_secs(600);
        Self {
            start: ten_minutes,
            save: ten_minutes,
            load: ten_minutes,
        }
    }
}

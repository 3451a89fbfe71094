//! How far a rank is in passing on the first failure.

use std::{
    collections::HashSet,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::clock;

/// The progress of passing on the first failure.
#[derive(Debug, Default)]
pub(super) struct Flood {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    has_begun: bool,
    is_done: bool,
    /// Ranks that have confirmed it.
    heard: HashSet<usize>,
}

impl Flood {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true for the first caller only.
    pub(super) fn begin(&self) -> bool {
        !std::mem::replace(&mut self.lock().has_begun, true)
    }

    /// Records that the failure was passed on.
    pub(super) fn end(&self) {
        self.lock().is_done = true;
        self.changed.notify_all();
    }

    /// Records that `rank` has confirmed the failure.
    pub(super) fn heard(&self, rank: usize) {
        self.lock().heard.insert(rank);
        self.changed.notify_all();
    }

    /// Waits until the failure was passed on, or until `deadline`.
    pub(super) fn await_end(&self, deadline: Instant) {
        self.wait(deadline, |state| state.is_done);
    }

    /// Waits until `rank` has confirmed the failure. Returns false at `deadline`.
    pub(super) fn await_heard(&self, rank: usize, deadline: Instant) -> bool {
        self.wait(deadline, |state| state.heard.contains(&rank))
    }

    fn wait(&self, deadline: Instant, is_met: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        loop {
            if is_met(&state) {
                return true;
            }
            let left = deadline.saturating_duration_since(clock::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

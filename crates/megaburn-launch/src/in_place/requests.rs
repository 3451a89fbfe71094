//! What a launcher asks a rank that trains.

use std::sync::atomic::{AtomicBool, Ordering};

/// What the launcher asks. Ranks hear it at different times.
#[derive(Debug, Default)]
pub struct LauncherRequests {
    regroup: AtomicBool,
    leave: AtomicBool,
}

impl LauncherRequests {
    /// Whether ranks are to save at the end of a step and then to
    /// [wait](crate::RestartInPlace::wait), because the number of hosts is to change. They must agree
    /// on it.
    pub fn regroup(&self) -> bool {
        self.regroup.load(Ordering::Relaxed)
    }

    /// Whether this rank is to end its collectives at once and then to
    /// [wait](crate::RestartInPlace::wait): the ranks of another host have ended, which its connections
    /// may not show.
    pub fn leave(&self) -> bool {
        self.leave.load(Ordering::Relaxed)
    }

    /// Asks a rank to regroup.
    pub fn ask_to_regroup(&self) {
        self.regroup.store(true, Ordering::Relaxed);
    }

    /// Asks a rank to leave.
    pub fn ask_to_leave(&self) {
        self.leave.store(true, Ordering::Relaxed);
    }

    /// Forgets what was asked of the attempt before.
    pub(super) fn clear(&self) {
        self.regroup.store(false, Ordering::Relaxed);
        self.leave.store(false, Ordering::Relaxed);
    }
}

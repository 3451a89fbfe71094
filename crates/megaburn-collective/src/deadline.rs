use std::time::{Duration, Instant};

use crate::clock;

/// Until when something is waited for, and since when, on the clock of [`crate::clock`]. In the first
/// half of its time a wait does not end early because another rank's wait is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    since: Instant,
    half: Instant,
    at: Instant,
}

impl Deadline {
    /// From now on.
    pub(crate) fn after(time: Duration) -> Self {
        let (since, at) = span(time);
        Self {
            since,
            half: since + (at - since) / 2,
            at,
        }
    }

    /// So much longer, for a wait whose time was over: it is in its second half.
    pub(crate) fn extended(time: Duration) -> Self {
        let (since, at) = span(time);
        Self {
            since,
            half: since,
            at,
        }
    }

    /// The same; or, if it is over because a rank that works was waited for longer, one of `time` from
    /// now on for what is left of the call.
    pub(crate) fn or_after(self, time: Duration) -> Self {
        if self.is_over() {
            Self::after(time)
        } else {
            self
        }
    }

    /// When it is over.
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// When half of it is.
    pub(crate) fn half(&self) -> Instant {
        self.half
    }

    pub(crate) fn is_over(&self) -> bool {
        clock::now() >= self.at
    }

    pub(crate) fn is_half_over(&self) -> bool {
        clock::now() >= self.half
    }

    /// How long it has been waited.
    pub(crate) fn waited(&self) -> Duration {
        clock::now()
            .saturating_duration_since(self.since)
            .min(self.at - self.since)
    }
}

/// A stretch of time from now on. One beyond the clock's range is a year.
fn span(time: Duration) -> (Instant, Instant) {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let since = clock::now();
    (since, since.checked_add(time).unwrap_or(since + YEAR))
}

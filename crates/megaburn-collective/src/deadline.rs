use std::time::{Duration, Instant};

use crate::clock;

/// The end and the start of a wait, on the clock of [`crate::clock`]. In the first half of its time
/// a wait does not end early because another rank timed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    since: Instant,
    half: Instant,
    at: Instant,
}

impl Deadline {
    /// A deadline `time` from now.
    pub(crate) fn after(time: Duration) -> Self {
        let (since, at) = span(time);
        Self {
            since,
            half: since + (at - since) / 2,
            at,
        }
    }

    /// Extends a wait that has timed out by `time`; it counts as being in its second half.
    pub(crate) fn extended(time: Duration) -> Self {
        let (since, at) = span(time);
        Self {
            since,
            half: since,
            at,
        }
    }

    /// Returns this deadline. If it has passed because a busy rank was waited for longer, returns a
    /// new deadline `time` from now, for the rest of the call.
    pub(crate) fn or_after(self, time: Duration) -> Self {
        if self.is_over() {
            Self::after(time)
        } else {
            self
        }
    }

    /// The end of the wait.
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// The middle of the wait.
    pub(crate) fn half(&self) -> Instant {
        self.half
    }

    pub(crate) fn is_over(&self) -> bool {
        clock::now() >= self.at
    }

    pub(crate) fn is_half_over(&self) -> bool {
        clock::now() >= self.half
    }

    /// How long the wait has lasted.
    pub(crate) fn waited(&self) -> Duration {
        clock::now()
            .saturating_duration_since(self.since)
            .min(self.at - self.since)
    }
}

/// The start and end of a span of `time` from now. A span beyond the clock's range becomes a year.
fn span(time: Duration) -> (Instant, Instant) {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let since = clock::now();
    (since, since.checked_add(time).unwrap_or(since + YEAR))
}

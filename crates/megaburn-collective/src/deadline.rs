use std::time::{Duration, Instant};

/// Until when something is waited for, and since when: a wait of which less than half is over is not
/// what others wait for too long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    since: Instant,
    at: Instant,
}

impl Deadline {
    /// From now on.
    pub(crate) fn after(time: Duration) -> Self {
        const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
        let since = Instant::now();
        // A time beyond the clock's range is a year.
        Self { since, at: since.checked_add(time).unwrap_or(since + YEAR) }
    }

    /// When it is over.
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// When half of it is.
    pub(crate) fn half(&self) -> Instant {
        self.since + (self.at - self.since) / 2
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.at
    }

    pub(crate) fn is_half_over(&self) -> bool {
        Instant::now() >= self.half()
    }

    /// How long it has been waited.
    pub(crate) fn waited(&self) -> Duration {
        self.since.elapsed().min(self.at - self.since)
    }
}

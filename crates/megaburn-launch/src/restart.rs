//! When ranks that failed are started again.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::verdict::Outcome;

/// An attempt that lasts less than this counts as a quick failure.
const QUICK: Duration = Duration::from_secs(10);
/// The longest pause before a restart.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How often ranks are started again after a failure.
///
/// A failure after 10 seconds or more is followed by a restart at once. After quicker failures in a row
/// the launcher pauses for 1, 2, 4 and so on up to 60 seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    /// The number of restarts.
    pub restarts: usize,
    /// Only restarts within this time count; `None` counts those of the whole job.
    pub window: Option<Duration>,
}

impl RestartPolicy {
    /// The first failure ends the job.
    pub const NEVER: Self = Self::new(0);

    /// At most `restarts` restarts of the whole job.
    pub const fn new(restarts: usize) -> Self {
        Self {
            restarts,
            window: None,
        }
    }

    /// Counts only the restarts within the time `window`, so that rare failures never end the job.
    pub const fn with_window(self, window: Option<Duration>) -> Self {
        Self { window, ..self }
    }
}

/// A restart that the policy permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Restart {
    /// Its number among those that count, from 1.
    pub(crate) number: usize,
    /// The pause before it.
    pub(crate) pause: Duration,
}

/// The restarts of a job.
#[derive(Debug)]
pub(crate) struct Restarts {
    policy: RestartPolicy,
    /// When those that count were made.
    made: VecDeque<Instant>,
    /// How many attempts in a row failed quickly.
    quick: u32,
}

impl Restarts {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self {
            policy,
            made: VecDeque::new(),
            quick: 0,
        }
    }

    /// The restart after an attempt that failed at the time `now` and lasted for `lasted`; `None`
    /// if no restart is left.
    fn next(&mut self, now: Instant, lasted: Duration) -> Option<Restart> {
        let RestartPolicy { restarts, window } = self.policy;
        if let Some(window) = window {
            self.made.retain(|at| now.duration_since(*at) < window);
        }
        if self.made.len() >= restarts {
            return None;
        }
        self.quick = if lasted < QUICK { self.quick + 1 } else { 0 };
        let pause = match self.quick {
            0 => Duration::ZERO,
            quick => Duration::from_secs(1 << (quick - 1).min(6)).min(LONGEST_PAUSE),
        };
        self.made.push_back(now);
        Some(Restart {
            number: self.made.len(),
            pause,
        })
    }

    /// The restart after an attempt that failed with `outcome` now; `None` if there is none. Says
    /// what follows, and why.
    pub(crate) fn after(
        &mut self,
        outcome: &Outcome,
        lasted: Duration,
        mut say: impl FnMut(&str),
    ) -> Option<Restart> {
        if self.policy.restarts > 0
            && let Some(why) = outcome.obstacle()
        {
            say(&format!("no restart: {why}"));
            return None;
        }
        let restart = self.next(Instant::now(), lasted);
        let text = match restart {
            Some(restart) => Some(self.describe(restart)),
            None => self.describe_end(),
        };
        text.iter().for_each(|text| say(text));
        restart
    }

    /// Describes a restart: `restart 2 of 3 in 4 s`.
    fn describe(&self, restart: Restart) -> String {
        let Restart { number, pause } = restart;
        let when = match pause.as_secs() {
            0 => "now".to_string(),
            seconds => format!("in {seconds} s"),
        };
        format!(
            "restart {number} of {}{} {when}",
            self.policy.restarts,
            self.within()
        )
    }

    /// Says that no restart is left; `None` if the policy permits none at all.
    fn describe_end(&self) -> Option<String> {
        let all = self.policy.restarts;
        let plural = if all == 1 { "" } else { "s" };
        (all > 0).then(|| {
            format!(
                "no restart is left of {all} restart{plural}{}",
                self.within()
            )
        })
    }

    fn within(&self) -> String {
        self.policy.window.map_or_else(String::new, |window| {
            format!(" within {} s", window.as_secs())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn quick_failures_pause_longer_and_longer_and_a_long_attempt_ends_that() {
        let mut restarts = Restarts::new(RestartPolicy::new(100));
        let now = Instant::now();
        let mut pause = |lasted| {
            restarts
                .next(now, Duration::from_secs(lasted))
                .unwrap()
                .pause
        };
        let pauses: Vec<_> = (0..9).map(|_| pause(5).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!((pause(10).as_secs(), pause(9).as_secs()), (0, 1));
    }

    #[test]
    fn a_window_forgets_old_restarts_and_without_one_all_count() {
        let start = Instant::now();
        for (window, left) in [(None, false), (Some(HOUR), true)] {
            let policy = RestartPolicy::new(2).with_window(window);
            let mut restarts = Restarts::new(policy);
            for minute in [0, 10] {
                let at = start + Duration::from_secs(60 * minute);
                assert!(restarts.next(at, HOUR).is_some());
            }
            let within = start + Duration::from_secs(3599);
            assert_eq!(restarts.next(within, HOUR), None);
            let after = start + HOUR;
            assert_eq!(restarts.next(after, HOUR).is_some(), left);
        }
        let mut never = Restarts::new(RestartPolicy::NEVER);
        assert_eq!(never.next(start, HOUR), None);
        assert_eq!(never.describe_end(), None);
    }

    #[test]
    fn restarts_are_described_with_their_number_and_pause() {
        let policy = RestartPolicy::new(3).with_window(Some(HOUR));
        let restarts = Restarts::new(policy);
        let at = |number, seconds| Restart {
            number,
            pause: Duration::from_secs(seconds),
        };
        assert_eq!(
            restarts.describe(at(2, 4)),
            "restart 2 of 3 within 3600 s in 4 s"
        );
        assert_eq!(
            restarts.describe(at(1, 0)),
            "restart 1 of 3 within 3600 s now"
        );
        assert_eq!(
            restarts.describe_end().unwrap(),
            "no restart is left of 3 restarts within 3600 s"
        );
    }
}

//! The signals that ask a run to save and stop, and when a further one means that it must end at
//! once.

use std::{
    fs,
    time::{Duration, Instant},
};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};

use crate::child::LAUNCHER;

/// Signals within this time are one request: a terminal and a launcher may both forward a Ctrl-C.
const ONE_REQUEST: Duration = Duration::from_secs(1);
/// Like [`ONE_REQUEST`], for a rank under a launcher. The launcher has already merged signals
/// within [`ONE_REQUEST`], and its second request may reach the rank slightly less than that after
/// the first.
const UNDER_LAUNCHER: Duration = Duration::from_millis(500);

/// The signals that ask a run to save and stop: SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, and SIGHUP
/// unless the program was started with it ignored, as `nohup` does.
pub fn stop_signals() -> Vec<i32> {
    with_unless_ignored(vec![SIGTERM, SIGINT, SIGUSR1, SIGUSR2], SIGHUP)
}

/// The signals that a launcher forwards: [`stop_signals`] and SIGTSTP, which Ctrl-Z sends.
pub(crate) fn passed_on() -> Vec<i32> {
    with_unless_ignored(stop_signals(), SIGTSTP)
}

fn with_unless_ignored(mut signals: Vec<i32>, signal: i32) -> Vec<i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !is_ignored(&status, signal) {
        signals.push(signal);
    }
    signals
}

/// Whether a process with this `/proc/PID/status` ignores a signal.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Distinguishes repeated requests to stop from the first one.
#[derive(Clone, Copy, Debug)]
pub struct StopRequests {
    first: Option<Instant>,
    one_request: Duration,
}

impl Default for StopRequests {
    /// For a program that receives its signals directly, not through a launcher.
    fn default() -> Self {
        Self {
            first: None,
            one_request: ONE_REQUEST,
        }
    }
}

impl StopRequests {
    /// For a rank, which may have been started by `megaburn launch`.
    pub fn of_rank() -> Self {
        match std::env::var_os(LAUNCHER) {
            Some(_) => Self {
                first: None,
                one_request: UNDER_LAUNCHER,
            },
            None => Self::default(),
        }
    }

    /// Records a signal and returns whether the program must end at once. It returns `false` for
    /// the first signal and for those within a second of it (half a second under a launcher), which
    /// are one request, and `true` for later ones.
    pub fn is_repeated(&mut self, now: Instant) -> bool {
        let first = *self.first.get_or_insert(now);
        now.saturating_duration_since(first) >= self.one_request
    }

    /// Whether a signal was received.
    pub fn is_requested(&self) -> bool {
        self.first.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_within_a_second_are_one_request() {
        let mut requests = StopRequests::default();
        let begin = Instant::now();
        let repeated = |requests: &mut StopRequests, millis| {
            requests.is_repeated(begin + Duration::from_millis(millis))
        };
        assert!(!requests.is_requested());
        for (millis, expected) in [
            (0, false),
            (200, false),
            (999, false),
            (1000, true),
            (1001, true),
        ] {
            assert_eq!(
                repeated(&mut requests, millis),
                expected,
                "after {millis} ms"
            );
        }
        assert!(requests.is_requested());
    }

    #[test]
    fn nohup_is_respected() {
        let nohup = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000001\n";
        assert!(is_ignored(nohup, SIGHUP) && !is_ignored(nohup, SIGTERM));
        assert!(!is_ignored("SigIgn:\t0000000000001000", SIGHUP) && !is_ignored("", SIGHUP));
    }
}

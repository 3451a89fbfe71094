//! Detects a rank that gives no sign of life while no other rank waits for it in a collective: one
//! that hangs in a kernel, in a file system, or in a world of one rank.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::Duration,
};

use megaburn_collective::{Pulse, Quiet};

use crate::{error::TrainError, exit::Exit, last_words::end_process};

/// Added to the limit of a phase: other ranks that wait notice first, and report more.
const AFTER_OTHERS: Duration = Duration::from_secs(10);
/// Longest interval between two checks.
const TICK: Duration = Duration::from_secs(1);

/// A thread that watches one rank of this process until it is dropped.
#[derive(Debug)]
pub(crate) struct Monitor {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Ends the process with [`Exit::Failed`] if the rank gives no sign of life for `limit`, or
    /// makes no progress in a phase for longer than the phase's limit. A hanging thread cannot be
    /// ended in any other way.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn start(rank: usize, pulse: Pulse, limit: Duration) -> Result<Self, TrainError> {
        Self::start_with(pulse, limit, move |why| {
            let next = "its process ends; start the run again to resume from the last checkpoint";
            end_process(
                format!("error: rank {rank} {why}; {next}"),
                Exit::Failed.code().into(),
            )
        })
    }

    fn start_with(
        pulse: Pulse,
        limit: Duration,
        hangs: impl FnOnce(String) + Send + 'static,
    ) -> Result<Self, TrainError> {
        let (stop, stopped) = mpsc::channel();
        let watch = move || {
            let tick = TICK.min(limit / 4);
            while stopped.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
                if let Some(why) = pulse
                    .quiet()
                    .and_then(|quiet| heartbeat_overdue(quiet, limit))
                {
                    return hangs(why);
                }
            }
        };
        let thread = thread::Builder::new().name("monitor".into()).spawn(watch);
        let thread = thread.map_err(|error| TrainError::NoThread {
            why: error.to_string(),
        })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What is wrong with a rank that has been quiet for too long; `None` if it is within its limit.
fn heartbeat_overdue(quiet: Quiet, limit: Duration) -> Option<String> {
    let Quiet {
        since,
        phase,
        limit: of_phase,
    } = quiet;
    let seconds = since.as_secs();
    match (phase, of_phase) {
        (Some(phase), Some(limit)) => (since >= limit.saturating_add(AFTER_OTHERS)).then(|| {
            format!(
                "is in `{phase}` and has made no progress for {seconds} s (`{}`)",
                phase.limit_key()
            )
        }),
        _ => (since >= limit).then(|| {
            format!("has made no progress for {seconds} s (`train.step_timeout_seconds`)")
        }),
    }
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{Group, Phase};

    use super::*;

    #[test]
    fn a_rank_alone_in_its_world_that_hangs_is_noticed() {
        let world = Group::single(0);
        let limit = Duration::from_millis(200);
        let (told, hears) = mpsc::channel();
        let tell = move |why| told.send(why).unwrap();
        let _monitor = Monitor::start_with(world.pulse(), limit, tell).unwrap();
        for _ in 0..8 {
            thread::sleep(limit / 4);
            world.pulse().beat();
        }
        hears.try_recv().expect_err("it gives signs");
        let why = hears.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(
            why.contains("no progress") && why.contains("step_timeout"),
            "{why}"
        );
    }

    #[test]
    fn a_phase_has_its_own_limit() {
        let quiet = |seconds| Quiet {
            since: Duration::from_secs(seconds),
            phase: Some(Phase::Save),
            limit: Some(Duration::from_secs(600)),
        };
        assert_eq!(heartbeat_overdue(quiet(605), Duration::from_secs(1)), None);
        let why = heartbeat_overdue(quiet(611), Duration::from_secs(1)).unwrap();
        assert!(
            why.contains("is in `save`") && why.contains("train.save_timeout"),
            "{why}"
        );
    }
}

//! Detects a rank that gives no sign of life while no other rank waits for it in a collective: one
//! that hangs in a kernel, in a file system, or in a world of one rank.

use std::{
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use megaburn_collective::{Group, Pulse, Quiet};
use megaburn_launch::LauncherRequests;

use crate::{error::TrainError, exit::Exit, hang::HangReports, last_words::end_process};

/// Added to the limit of a phase: other ranks that wait notice first, and report more.
const AFTER_OTHERS: Duration = Duration::from_secs(10);
/// Longest interval between two checks. Other ranks and the launcher may end this process a second
/// after the first failure.
const TICK: Duration = Duration::from_millis(200);
/// How long the other ranks of a process may take to report before it ends.
const REPORTS: Duration = Duration::from_millis(500);

/// A thread that watches one rank of this process until it is dropped.
#[derive(Debug)]
pub(crate) struct Monitor {
    /// Writes what this rank did when ranks hang.
    pub(crate) hangs: Arc<HangReports>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Ends the process with [`Exit::Failed`] if the rank gives no sign of life for `limit`, or
    /// makes no progress in a phase for longer than the phase's limit. A hanging thread cannot be
    /// ended in any other way. It also reports what the rank is doing when ranks hang, because the
    /// rank's own thread may be stuck, and ends its collectives if the launcher asks it to leave.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn start(
        world: &Group,
        limit: Duration,
        requests: Arc<LauncherRequests>,
    ) -> Result<Self, TrainError> {
        let rank = world.rank();
        let hangs = HangReports::new(world);
        let ends = hangs.clone();
        let leaving = world.clone();
        let mut has_left = false;
        let leave = move || {
            if requests.leave() && !has_left {
                leaving.abort("the ranks of another host have ended, as its launcher says");
                has_left = true;
            }
        };
        Self::start_with(world.pulse(), hangs, limit, leave, move |why| {
            ends.end(&format!("rank {rank} {why}"));
            thread::sleep(REPORTS);
            let next = "its process ends; start the run again to resume from the last checkpoint";
            end_process(
                format!("error: rank {rank} {why}; {next}"),
                Exit::Failed.code().into(),
            )
        })
    }

    fn start_with(
        pulse: Pulse,
        hangs: Arc<HangReports>,
        limit: Duration,
        mut look: impl FnMut() + Send + 'static,
        end: impl FnOnce(String) + Send + 'static,
    ) -> Result<Self, TrainError> {
        let (stop, stopped) = mpsc::channel::<()>();
        let reports = hangs.clone();
        let watch = move || {
            let tick = TICK.min(limit / 4);
            loop {
                let is_stopped = stopped.recv_timeout(tick) != Err(RecvTimeoutError::Timeout);
                reports.look();
                look();
                if is_stopped {
                    return;
                }
                if let Some(why) = pulse
                    .quiet()
                    .and_then(|quiet| heartbeat_overdue(quiet, limit))
                {
                    return end(why);
                }
            }
        };
        let thread = thread::Builder::new().name("monitor".into()).spawn(watch);
        let thread = thread.map_err(|error| TrainError::NoThread {
            why: error.to_string(),
        })?;
        Ok(Self {
            hangs,
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
        section,
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
            let place = section.map_or(String::new(), |section| format!(" in `{section}`"));
            format!("has made no progress for {seconds} s{place} (`train.step_timeout_seconds`)")
        }),
    }
}

#[cfg(test)]
mod tests {
    use megaburn_collective::Phase;

    use super::*;

    #[test]
    fn a_rank_alone_in_its_world_that_hangs_is_noticed() {
        let world = Group::single(0);
        let limit = Duration::from_millis(200);
        let (told, hears) = mpsc::channel();
        let tell = move |why| told.send(why).unwrap();
        let hangs = HangReports::new(&world);
        let _monitor = Monitor::start_with(world.pulse(), hangs, limit, || {}, tell).unwrap();
        let _section = world.section("forward");
        for _ in 0..8 {
            thread::sleep(limit / 4);
            world.pulse().beat();
        }
        hears.try_recv().expect_err("it gives signs");
        let why = hears.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(
            why.contains("no progress") && why.contains("in `forward` (`train.step_timeout"),
            "{why}"
        );
    }

    #[test]
    fn a_phase_has_its_own_limit() {
        let quiet = |seconds| Quiet {
            since: Duration::from_secs(seconds),
            phase: Some(Phase::Save),
            limit: Some(Duration::from_secs(600)),
            section: None,
        };
        assert_eq!(heartbeat_overdue(quiet(605), Duration::from_secs(1)), None);
        let why = heartbeat_overdue(quiet(611), Duration::from_secs(1)).unwrap();
        assert!(
            why.contains("is in `save`") && why.contains("train.save_timeout"),
            "{why}"
        );
    }
}

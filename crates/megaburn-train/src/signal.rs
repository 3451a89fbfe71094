//! Stopping on request: the first SIGINT or SIGTERM asks the run to save and end, a later one ends
//! the process at once.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
    iterator::Signals,
};

use crate::TrainError;

/// Signals this close together are one request: a terminal and a launcher both pass on a Ctrl-C.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// Tells whether the process was asked to stop.
///
/// Clones watch the same request. Only this process is told: the ranks of a run must agree on what
/// they heard (Megatron gathers the flag over the world) before one of them leaves the loop.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    number: Arc<AtomicUsize>,
}

impl StopSignal {
    /// Listens to nothing: for programs that handle signals themselves.
    pub fn never() -> Self {
        Self::default()
    }

    /// Listens to SIGINT and SIGTERM from now on, once in a process. A signal of either kind that
    /// comes a second or more after the first exits at once, without saving, with code 130 (SIGINT)
    /// or 143 (SIGTERM).
    ///
    /// # Errors
    /// The operating system refuses a signal handler.
    pub fn install() -> Result<Self, TrainError> {
        let fail = |source| TrainError::Signals { source };
        let stop = Self::never();
        for signal in [SIGINT, SIGTERM] {
            flag::register_usize(signal, stop.number.clone(), signal as usize).map_err(fail)?;
        }
        let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(fail)?;
        thread::spawn(move || {
            let mut first = None;
            for signal in signals.forever() {
                let first: Instant = *first.get_or_insert_with(Instant::now);
                if first.elapsed() >= ONE_REQUEST {
                    // A checkpoint in the making stays behind uncommitted; the next start clears it.
                    process::exit(128 + signal);
                }
            }
        });
        Ok(stop)
    }

    /// The signal that asked the run to stop, if one did.
    pub fn requested(&self) -> Option<&'static str> {
        match self.number.load(Ordering::Relaxed) as i32 {
            SIGINT => Some("SIGINT"),
            SIGTERM => Some("SIGTERM"),
            _ => None,
        }
    }
}

//! Stopping on request: the first SIGINT or SIGTERM asks the run to save and end, the second ends
//! the process at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::TrainError;

/// Tells whether the process was asked to stop.
///
/// Clones watch the same request. Only this process is told: the ranks of a run must agree on what
/// they heard (Megatron gathers the flag over the world) before one of them leaves the loop.
#[derive(Clone, Debug)]
pub struct StopSignal {
    number: Arc<AtomicUsize>,
}

impl StopSignal {
    /// Listens to SIGINT and SIGTERM from now on, once in a process. A second signal of either
    /// kind exits at once, without saving, with code 130 (SIGINT) or 143 (SIGTERM).
    ///
    /// # Errors
    /// The operating system refuses a signal handler.
    pub fn install() -> Result<Self, TrainError> {
        let stop = Self { number: Arc::new(AtomicUsize::new(0)) };
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // Handlers run in the order of registration: the exit must look at `asked` before this
            // very signal sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, asked.clone())
                .and_then(|_| flag::register(signal, asked.clone()))
                .and_then(|_| flag::register_usize(signal, stop.number.clone(), signal as usize))
                .map_err(|source| TrainError::Signals { source })?;
        }
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

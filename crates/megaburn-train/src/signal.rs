//! Stopping on request: the first signal asks the run to save and end; a later one ends the process
//! immediately.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use megaburn_launch::{StopRequests, stop_signals};
use signal_hook::{flag, iterator::Signals, low_level::signal_name};

use crate::{error::TrainError, last_words::end_process};

/// Reports whether the process was asked to stop.
///
/// Clones share the same request. Only this process is notified, so the ranks of a run must agree
/// on the request (Megatron-LM gathers the flag over the world) before one of them leaves the loop.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    /// The first signal, which is the reason for the stop.
    first: Arc<AtomicUsize>,
    /// The latest signal, which is known slightly before the listening thread records it as the
    /// first.
    latest: Arc<AtomicUsize>,
    phase: Arc<Mutex<Phase>>,
}

/// What the first signal does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// There is nothing to save yet: it ends the process.
    #[default]
    Starting,
    /// The run saves and ends.
    Training,
}

impl StopSignal {
    /// A signal that is never received, for programs that handle signals themselves.
    pub fn never() -> Self {
        Self::default()
    }

    /// Listens to SIGTERM, SIGINT, SIGHUP (unless it was ignored, as under `nohup`), SIGUSR1 and
    /// SIGUSR2 from now on. Call it once per process.
    ///
    /// Until [`begin_training`](Self::begin_training) there is nothing to save, and a signal ends
    /// the process immediately, with exit code 128 + the signal's number. From then on:
    ///
    /// - The first signal is a request, which [`requested`](Self::requested) reports.
    /// - Signals within a second of it are part of the same request. (Under `megaburn launch`,
    ///   which has already merged repeated signals, it is half a second.)
    /// - A later signal ends the process immediately with the same exit code, without saving and
    ///   without running the exit handlers of libraries.
    ///
    /// # Errors
    /// The operating system refuses a signal handler.
    pub fn install() -> Result<Self, TrainError> {
        let fail = |source| TrainError::Signals { source };
        let stop = Self::never();
        let listened = stop_signals();
        for &signal in &listened {
            flag::register_usize(signal, stop.latest.clone(), signal as usize).map_err(fail)?;
        }
        let mut signals = Signals::new(listened).map_err(fail)?;
        let phase = stop.phase.clone();
        let first = stop.first.clone();
        let listen = move || {
            let mut requests = StopRequests::of_rank();
            for signal in signals.forever() {
                let number = signal as usize;
                let _ = first.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
                let is_repeated = requests.is_repeated(Instant::now());
                // Held until the process has ended, so that training cannot begin in the meantime.
                let phase = phase.lock().unwrap_or_else(PoisonError::into_inner);
                if is_repeated || *phase == Phase::Starting {
                    end_now(signal, *phase);
                }
            }
        };
        thread::Builder::new()
            .name("signals".into())
            .spawn(listen)
            .map_err(fail)?;
        Ok(stop)
    }

    /// From now on there is something to save, so the first signal no longer ends the process.
    pub fn begin_training(&self) {
        self.set_phase(Phase::Training);
    }

    /// From now on there is nothing to save, so the first signal ends the process again.
    pub(crate) fn end_training(&self) {
        self.set_phase(Phase::Starting);
    }

    fn set_phase(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// The first signal that asked the run to stop, if any. Calling this means that the caller
    /// handles the request, so it also [begins training](Self::begin_training).
    pub fn requested(&self) -> Option<&'static str> {
        self.begin_training();
        self.number().and_then(signal_name)
    }

    /// As [`requested`](Self::requested), as a number and without beginning training.
    pub(crate) fn number(&self) -> Option<i32> {
        let numbers = [&self.first, &self.latest].map(|number| number.load(Ordering::Relaxed));
        let number = numbers.into_iter().find(|number| *number > 0)?;
        i32::try_from(number).ok()
    }
}

/// Ends the process. A partially written checkpoint stays uncommitted; the next start removes it.
fn end_now(signal: i32, phase: Phase) -> ! {
    let name = signal_name(signal).unwrap_or("a signal");
    let words = match phase {
        Phase::Starting => {
            format!("stopped by {name} before training began; there was nothing to save")
        }
        Phase::Training => format!("ended by {name}, the second signal, without saving"),
    };
    end_process(words, 128 + signal)
}

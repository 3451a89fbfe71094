//! Stopping on request: the first signal asks the run to save and end, a later one ends the process
//! at once.

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

use crate::{TrainError, last_words::end_process};

/// Tells whether the process was asked to stop.
///
/// Clones watch the same request. Only this process is told: the ranks of a run must agree on what
/// they heard (Megatron gathers the flag over the world) before one of them leaves the loop.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    /// The signal that came first: it is the reason of the stop.
    first: Arc<AtomicUsize>,
    /// The one that came last, known a moment before its thread takes note of the first.
    latest: Arc<AtomicUsize>,
    phase: Arc<Mutex<Phase>>,
}

/// What a first signal means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// There is nothing to save yet: the process ends.
    #[default]
    Starting,
    /// The run saves and ends.
    Training,
}

impl StopSignal {
    /// Listens to nothing: for programs that handle signals themselves.
    pub fn never() -> Self {
        Self::default()
    }

    /// Listens to SIGTERM, SIGINT, SIGHUP (unless it was ignored, as under `nohup`), SIGUSR1 and
    /// SIGUSR2 from now on, once in a process.
    ///
    /// Until [`begin_training`](Self::begin_training) there is nothing to save, and the process ends
    /// at once, with 128 and the signal's number. From then on the first signal is a request, which
    /// [`requested`](Self::requested) tells; those within a second of it (half a second under
    /// `megaburn launch`, which has joined them already) are the same request; a later one ends the process at once,
    /// with the same code, without saving and without running
    /// what libraries registered for the exit.
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
                // Held until the process has ended, so that training cannot begin meanwhile.
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

    /// From now on there is something to save: a first signal does not end the process any more.
    pub fn begin_training(&self) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = Phase::Training;
    }

    /// The signal that asked the run to stop, if one did: the first one. Whoever asks this answers the request:
    /// training has [begun](Self::begin_training).
    pub fn requested(&self) -> Option<&'static str> {
        self.begin_training();
        self.number().and_then(signal_name)
    }

    /// The same signal as a number.
    pub(crate) fn number(&self) -> Option<i32> {
        let numbers = [&self.first, &self.latest].map(|number| number.load(Ordering::Relaxed));
        let number = numbers.into_iter().find(|number| *number > 0)?;
        i32::try_from(number).ok()
    }
}

/// Ends the process. A checkpoint in the making stays behind uncommitted; the next start clears it.
fn end_now(signal: i32, phase: Phase) -> ! {
    let name = signal_name(signal).unwrap_or("a signal");
    let words = match phase {
        Phase::Starting => {
            format!("stopped by {name} before training began; nothing was to be saved")
        }
        Phase::Training => format!("ended by {name}, the second signal, without saving"),
    };
    end_process(words, 128 + signal)
}

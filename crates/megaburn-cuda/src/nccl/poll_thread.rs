//! The thread that looks at all communicators of the process, and aborts them when its observer says
//! so. When that is, `megaburn-collective` decides (`device/watchdog.rs`).

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{calls::Calls, communicator::Communicator, exit};
use crate::error::CudaError;

/// The interval between two looks.
const TICK: Duration = Duration::from_millis(20);

/// The progress of the calls of one communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupStatus {
    /// The key that was passed to [`PollThread::watch`].
    pub key: u64,
    /// Calls that the GPU has finished since the previous look, by the ids of their labels.
    pub finished: Vec<u64>,
    /// The oldest unfinished call, and when it was made.
    pub oldest: Option<(u64, Instant)>,
    /// The first failure: an error of NCCL or the driver, or a call that this rank could not make.
    pub fault: Option<String>,
}

/// Decides what a [`PollThread`] does about what it sees.
pub trait Observer: Send + 'static {
    /// Inspects all communicators of the process, about fifty times a second. If it returns a
    /// reason, all current and future communicators are aborted with it.
    fn look(&mut self, standings: &[GroupStatus]) -> Option<String>;
}

/// A thread that monitors the communicators of a process. It ends when this is dropped.
#[derive(Debug)]
pub struct PollThread {
    watched: Watched,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

type Watched = Arc<Mutex<Vec<(u64, Weak<Calls>)>>>;

impl PollThread {
    /// Starts the watchdog's thread.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(mut observer: impl Observer) -> Result<Self, CudaError> {
        let (stop, stopped) = mpsc::channel();
        let watched = Watched::default();
        let watching = watched.clone();
        let run = move || {
            while stopped.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
                let live = live(&watching);
                // Unwatched calls might wait forever, so a panic of the observer aborts them.
                let look = || {
                    let standings: Vec<_> =
                        live.iter().map(|(key, calls)| stand(*key, calls)).collect();
                    observer.look(&standings)
                };
                match guarded(look) {
                    Ok(None) => {}
                    Ok(Some(reason)) => abort(live, &reason),
                    Err(reason) => {
                        tracing::error!("{reason}");
                        return abort(live, &reason);
                    }
                }
            }
        };
        let thread = thread::Builder::new()
            .name("nccl-watchdog".into())
            .spawn(run);
        let thread = thread.map_err(|error: io::Error| CudaError::Refused(error.to_string()))?;
        Ok(Self {
            watched,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Adds a communicator, which is monitored until it is dropped.
    pub fn watch(&self, key: u64, communicator: &Communicator) {
        lock(&self.watched).push((key, Arc::downgrade(&communicator.calls)));
    }
}

impl Drop for PollThread {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // If the observer itself drops the watchdog, directly or not, it cannot join its own
            // thread.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn live(watched: &Watched) -> Vec<(u64, Arc<Calls>)> {
    let mut watched = lock(watched);
    watched.retain(|(_, calls)| calls.strong_count() > 0);
    watched
        .iter()
        .filter_map(|(key, calls)| Some((*key, calls.upgrade()?)))
        .collect()
}

fn stand(key: u64, calls: &Calls) -> GroupStatus {
    // Events must be queried in the context that they were created in.
    if let Err(error) = calls.context().bind() {
        let fault = Some(error.to_string());
        return GroupStatus {
            key,
            fault,
            ..Default::default()
        };
    }
    let look = calls.look();
    GroupStatus {
        key,
        finished: look.finished,
        oldest: look.oldest,
        fault: look.fault,
    }
}

/// Returns the result of `look`, or a message if it panicked.
fn guarded<T>(look: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(look)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        format!("the NCCL watchdog panicked, which is a bug: {text}; all communicators are aborted")
    })
}

/// Aborts all communicators at once, each in its own thread, because the abort of one may have to
/// wait for a kernel that ends only with the abort of another.
fn abort(live: Vec<(u64, Arc<Calls>)>, reason: &str) {
    exit::wait_for_aborts();
    for (_, calls) in live {
        let reason = reason.to_string();
        let name = "nccl-abort".to_string();
        let under_way = exit::Abort::begin();
        let here = calls.clone();
        let abort = {
            let reason = reason.clone();
            move || {
                calls.abort(&reason);
                drop(under_way);
            }
        };
        // If no thread can be started, abort here: late and one by one, but reliably.
        if thread::Builder::new().name(name).spawn(abort).is_err() {
            here.abort(&reason);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_watch_is_a_reason_to_abort() {
        assert_eq!(guarded(|| 7), Ok(7));
        let reason = guarded(|| -> usize { panic!("index {} of 3", 4) }).unwrap_err();
        assert!(
            reason.contains("panicked") && reason.contains("index 4 of 3"),
            "{reason}"
        );
    }
}

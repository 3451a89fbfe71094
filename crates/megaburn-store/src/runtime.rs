//! The thread on which all requests of the process run. It never ends.

use std::future::Future;
use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// How often a thread that waits for a result asks whether to stop.
const TICK: Duration = Duration::from_millis(20);

/// Runs a future in the background, on the thread of requests.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    start(future).map(drop)
}

fn start(future: impl Future<Output = ()> + Send + 'static) -> io::Result<JoinHandle<()>> {
    Ok(runtime()?.spawn(future))
}

/// Runs a future and waits for its result; `None` if it was stopped before. The caller may be on a
/// thread of another runtime.
pub(crate) fn wait<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
    is_stopped: &(dyn Fn() -> bool + Sync),
) -> io::Result<Option<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let task = start(async move {
        // The receiver is dropped if the waiting thread panics or is stopped.
        let _ = sender.send(future.await);
    })?;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(result) => return Ok(Some(result)),
            Err(RecvTimeoutError::Timeout) if is_stopped() => {
                task.abort();
                return Ok(None);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the thread of requests ended early"));
            }
        }
    }
}

fn runtime() -> io::Result<&'static Runtime> {
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).thread_name("megaburn-objects");
    let built = builder.enable_all().build()?;
    // If another thread was faster, its runtime stays and this one ends.
    Ok(RUNTIME.get_or_init(|| built))
}

//! The thread on which all requests of the process run. It never ends.

use std::future::Future;
use std::io;
use std::sync::{OnceLock, mpsc};

use tokio::runtime::{Builder, Runtime};

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Runs a future in the background.
pub(super) fn spawn(future: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    runtime()?.spawn(future);
    Ok(())
}

/// Runs a future and waits for its result. The caller may be on a thread of another runtime.
pub(super) fn wait<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    spawn(async move {
        // Only a panic of the waiting thread drops the receiver.
        let _ = sender.send(future.await);
    })?;
    let ended = |_| io::Error::other("the thread of requests ended early");
    receiver.recv().map_err(ended)
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

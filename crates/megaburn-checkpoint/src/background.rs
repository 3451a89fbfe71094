//! Work on a thread of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use megaburn_collective::Progress;

use crate::error::CheckpointError;

/// The interval at which a rank that waits for its thread reports the thread's progress.
const TICK: Duration = Duration::from_millis(10);

/// The name of the threads that write checkpoints.
pub(crate) const WRITER: &str = "checkpoint-writer";

/// A thread that works on files while the program computes. Dropping it asks the work to stop, and
/// waits.
#[derive(Debug)]
pub struct Background<T> {
    name: &'static str,
    is_cancelled: Arc<AtomicBool>,
    /// Bytes that the work has read or written since they were last reported.
    num_bytes: Arc<AtomicU64>,
    /// Always `Some`, except while it is joined.
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts `work` on a thread called `name`. The work gets the flag that asks it to stop, and
    /// reports its progress.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(
        name: &'static str,
        work: impl FnOnce(&AtomicBool, &Progress) -> T + Send + 'static,
    ) -> Result<Self, CheckpointError> {
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let flag = is_cancelled.clone();
        let num_bytes = Arc::new(AtomicU64::new(0));
        let progress = Progress::counter(num_bytes.clone());
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(move || work(&flag, &progress));
        let thread = thread.map_err(|source| CheckpointError::NoThread { source })?;
        Ok(Self {
            name,
            is_cancelled,
            num_bytes,
            thread: Some(thread),
        })
    }
}

impl<T> Background<T> {
    /// Whether the work has ended.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the result, and reports to `progress` what the work reads and writes.
    ///
    /// # Errors
    /// The thread panicked; it has printed the message.
    pub fn wait(mut self, progress: &Progress) -> Result<T, CheckpointError> {
        while !self.is_done() {
            thread::sleep(TICK);
            let num_bytes = self.num_bytes.swap(0, Ordering::Relaxed);
            if num_bytes > 0 {
                progress.add(num_bytes);
            }
        }
        let thread = self.thread.take().expect("it is joined only once");
        let panicked = |_| CheckpointError::Panicked { thread: self.name };
        thread.join().map_err(panicked)
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its result is of no use any more.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_and_dropping_asks_the_work_to_stop() {
        let failed = Background::start(WRITER, |_, _| panic!("a panic of a test")).unwrap();
        let failed: Result<(), _> = failed.wait(&Progress::none());
        assert!(matches!(
            failed,
            Err(CheckpointError::Panicked { thread: WRITER })
        ));
        let done = Arc::new(AtomicBool::new(false));
        let flag = done.clone();
        let endless = Background::start(WRITER, move |is_cancelled, _| {
            while !is_cancelled.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            flag.store(true, Ordering::Relaxed);
        });
        let endless = endless.unwrap();
        assert!(!endless.is_done());
        drop(endless);
        assert!(done.load(Ordering::Relaxed), "the thread has ended");
    }
}

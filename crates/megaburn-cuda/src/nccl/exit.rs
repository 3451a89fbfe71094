//! Delays the exit of a process while communicators are being aborted.
//!
//! A rank that learns of a failure exits as soon as it has reported it, while its watchdog's
//! threads are inside `ncclCommAbort`. Without the delay, the state that they use is torn down
//! first and the process ends by SIGSEGV.

use std::{
    ffi::c_int,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long an exit waits at most.
const PATIENCE: Duration = Duration::from_secs(10);

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// An abort in progress, which the exit of the process waits for until this is dropped.
pub(super) struct Abort;

impl Abort {
    pub(super) fn begin() -> Self {
        UNDER_WAY.fetch_add(1, Ordering::AcqRel);
        Self
    }
}

impl Drop for Abort {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
    }
}

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> c_int;
}

/// Makes this process wait for aborts when it exits. The callback is registered after NCCL and CUDA
/// were loaded, so it runs before they are torn down.
pub(super) fn wait_for_aborts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the callback is a function of this program and neither panics nor exits. If it
        // cannot be registered, the exit does not wait.
        let _ = unsafe { atexit(until_done) };
    });
}

extern "C" fn until_done() {
    let deadline = Instant::now() + PATIENCE;
    while UNDER_WAY.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

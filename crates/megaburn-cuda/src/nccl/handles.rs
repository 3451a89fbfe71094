//! The two NCCL handles of a communicator, and their synchronization.
//!
//! Calls use a *blocking* communicator. For each call of a non-blocking one, NCCL starts a thread
//! that must be polled; this takes about 60 microseconds, more than a small collective. The members
//! first meet in a *non-blocking* communicator, because that may wait forever; the blocking one is
//! then split from it. The non-blocking parent is kept for aborts only: both share one abort flag,
//! so aborting the otherwise unused parent ends a call that another thread is making on the worker.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::nccl::sys::ncclComm_t;

use super::{
    api::{Api, Code},
    membership::{Membership, UniqueId},
    rendezvous::{Handle, async_error, init, refuse_overrides, settle, split},
};
use crate::{context::Context, error::CudaError};

/// How long an orderly close waits for the other members, and an abort for a call that is being
/// made.
const LINGER: Duration = Duration::from_secs(5);

/// The handles of a communicator. One thread at a time makes calls. The thread that ends the
/// communicator takes the handles out, so that no further call starts, and waits for the call in
/// progress. If that call does not return, the handles are leaked rather than freed while in use.
#[derive(Debug)]
pub(super) struct Handles {
    api: &'static Api,
    context: Context,
    state: Mutex<HandleState>,
    /// Locked while a call is being made.
    calling: Mutex<()>,
    /// Whether NCCL has freed the handles after the end.
    gone: AtomicBool,
}

#[derive(Debug)]
enum HandleState {
    Live(Pair),
    /// Aborted or closed, with the reason; the handles were taken out.
    Ended(String),
}

#[derive(Debug)]
struct Pair {
    /// The non-blocking communicator.
    parent: Handle,
    /// The blocking communicator.
    worker: Handle,
}

impl Handles {
    /// Joins the members that have the same `id`. The calling thread must have the GPU's context
    /// current.
    ///
    /// # Errors
    /// NCCL refuses, or `end`, which is called every millisecond, returned a reason to give up.
    pub(super) fn join(
        api: &'static Api,
        context: Context,
        id: UniqueId,
        members: Membership,
        end: &impl Fn() -> Option<String>,
    ) -> Result<Self, CudaError> {
        refuse_overrides()?;
        let parent = init(api, id, members)?;
        let met = settle(api, parent, "ncclCommInitRankConfig", end)
            .and_then(|()| split(api, parent, members, end));
        match met {
            Ok(worker) => {
                let state = Mutex::new(HandleState::Live(Pair { parent, worker }));
                let calling = Mutex::default();
                let gone = AtomicBool::new(false);
                Ok(Self {
                    api,
                    context,
                    state,
                    calling,
                    gone,
                })
            }
            Err(error) => {
                abort(api, parent);
                Err(error)
            }
        }
    }

    pub(super) fn context(&self) -> Context {
        self.context
    }

    /// Runs `call`, which enqueues work on a stream.
    ///
    /// # Errors
    /// NCCL fails, or the communicator has ended.
    pub(super) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&Api, ncclComm_t) -> Code,
    ) -> Result<(), CudaError> {
        // Lock before reading the state: the thread that ends the communicator waits for this lock
        // before it frees the handle.
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        let worker = match &*self.state() {
            HandleState::Live(pair) => pair.worker,
            HandleState::Ended(why) => return Err(CudaError::Refused(why.clone())),
        };
        let code = call(self.api, worker.0);
        match &*self.state() {
            _ if code == Code::SUCCESS => Ok(()),
            // The call failed because of the abort, so return the abort's reason.
            HandleState::Ended(why) => Err(CudaError::Refused(why.clone())),
            HandleState::Live(_) => Err(self.api.error(name, code, Some(worker.0))),
        }
    }

    /// NCCL's asynchronous error, if any. It returns `None` while a call is being made, since that
    /// call will see the error. The calling thread must have the GPU's context current.
    pub(super) fn fault(&self) -> Option<String> {
        let _calling = match self.calling.try_lock() {
            Ok(calling) => calling,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let HandleState::Live(Pair { worker, .. }) = &*self.state() else {
            return None;
        };
        let code = async_error(self.api, *worker);
        (!code.is_fine()).then(|| self.api.error("NCCL", code, Some(worker.0)).to_string())
    }

    /// Ends all calls, including those on the GPU; later calls fail with `reason`. Only the first
    /// abort or close has an effect.
    pub(super) fn abort(&self, reason: &str) {
        let Some(Pair { parent, worker }) = self.end(reason) else {
            return;
        };
        let _ = self.context.scope(|| {
            // The abort of the parent makes the call in progress return.
            if let Some(calling) = abort_while(self.api, parent, || self.after_the_call()) {
                abort(self.api, worker);
                drop(calling);
            }
            Ok(())
        });
        self.gone.store(true, Ordering::Release);
    }

    /// Locks calls; `None` if the call in progress does not return in time.
    fn after_the_call(&self) -> Option<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + LINGER;
        loop {
            match self.calling.try_lock() {
                Ok(calling) => return Some(calling),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }

    /// Waits for a limited time until the thread that is ending the communicator is done: a process
    /// that exits in the middle of `ncclCommAbort` crashes.
    pub(super) fn await_end(&self) {
        let deadline = Instant::now() + 2 * LINGER;
        while !self.gone.load(Ordering::Acquire) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Closes in order; waits for a limited time until the other members do so, too.
    pub(super) fn close(&self) {
        let Some(Pair { parent, worker }) = self.end("its group has ended") else {
            return;
        };
        let api = self.api;
        let context = self.context;
        let (done, finished) = mpsc::channel();
        let finalize = move || {
            // Capture the whole `Handle`, which is `Send`, and not only its field.
            let worker = worker;
            let _ = context.scope(|| {
                // SAFETY: the handle was taken out, and the caller holds the lock of calls.
                let code = unsafe { (api.comm_finalize)(worker.0) };
                // SAFETY: as above; the handle is not used again.
                let code = code.and(|| unsafe { (api.comm_destroy)(worker.0) });
                warn_of(api, "cannot close a communicator", code);
                Ok(())
            });
            let _ = done.send(());
        };
        let _ = context.scope(|| {
            // If a call does not return (an abort would have ended it), both handles are leaked.
            let Some(_calling) = self.after_the_call() else {
                return Ok(());
            };
            // Closing the blocking communicator waits for members that may never come, so use a
            // thread.
            let thread = thread::Builder::new()
                .name("nccl-close".into())
                .spawn(finalize);
            if thread.is_ok() && finished.recv_timeout(LINGER).is_ok() {
                // SAFETY: the handle was taken out, has nothing in flight and is not used again.
                warn_of(api, "ncclCommDestroy", unsafe {
                    (api.comm_destroy)(parent.0)
                });
            } else {
                // Aborting the parent sets the shared flag, which makes the worker's close return.
                abort_while(api, parent, || finished.recv_timeout(LINGER).ok());
            }
            Ok(())
        });
        self.gone.store(true, Ordering::Release);
    }

    /// Whether it was aborted or closed.
    pub(super) fn has_ended(&self) -> bool {
        matches!(&*self.state(), HandleState::Ended(_))
    }

    fn end(&self, reason: &str) -> Option<Pair> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, HandleState::Ended(reason.to_string())) {
            HandleState::Live(pair) => Some(pair),
            ended @ HandleState::Ended(_) => {
                *state = ended;
                None
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, HandleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Aborts the unused `parent` and, through the shared flag, the calls in progress on communicators
/// that were split from it. `wait` waits for these calls; the result is `None` if they did not
/// return.
fn abort_while<T>(api: &Api, parent: Handle, wait: impl FnOnce() -> Option<T>) -> Option<T> {
    // Inside a group, NCCL sets the abort flag at once, but frees the memory that the parent shares
    // with its children only at the end of the group, when no call uses it any more.
    // SAFETY: starting a group has no preconditions; it only has to be ended.
    warn_of(api, "ncclGroupStart", unsafe { (api.group_start)() });
    abort(api, parent);
    let waited = wait();
    if waited.is_some() {
        // SAFETY: as above.
        warn_of(api, "ncclGroupEnd", unsafe { (api.group_end)() });
    } else {
        tracing::warn!("an NCCL call did not return after its abort; its memory is leaked");
    }
    waited
}

/// Aborts a communicator, which is not used again.
fn abort(api: &Api, comm: Handle) {
    // SAFETY: the handle was taken out, and no call is being made with it (`Handles`).
    warn_of(api, "ncclCommAbort", unsafe { (api.comm_abort)(comm.0) });
}

fn warn_of(api: &Api, call: &'static str, code: Code) {
    if !code.is_fine() {
        tracing::warn!("{}", api.error(call, code, None));
    }
}

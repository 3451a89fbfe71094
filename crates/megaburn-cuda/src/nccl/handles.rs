//! NCCL's two handles of a communicator, and who may use them when.
//!
//! Calls are made with a *blocking* communicator: for each call of a non-blocking one NCCL starts a thread
//! and is asked until it is done, some 60 microseconds that are longer than a small collective. What
//! may wait for ever, the first meeting of the members, is done by a *non-blocking* one, which the other is
//! split from. It stays, for one thing: both have the same flag for an abort, so that aborting it, which
//! nobody uses, ends a call that another thread is making at that moment.

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
    Membership, UniqueId,
    api::{Api, Code},
    rendezvous::{async_error, init, refuse_overrides, settle, split},
};
use crate::{CudaError, context::Context};

/// How long an orderly end waits for the other members, and an abort for a call that is being made.
const LINGER: Duration = Duration::from_secs(5);

/// The handles. Calls are made by one thread at a time. Who ends the communicator takes the handles out, so
/// that no call begins any more, and waits for the one that is being made; if that does not come back, the
/// handles stay NCCL's for ever, rather than being freed under it.
#[derive(Debug)]
pub(super) struct Handles {
    api: &'static Api,
    context: Context,
    state: Mutex<HandleState>,
    /// Held while a call is being made.
    calling: Mutex<()>,
    /// Whether NCCL has let go of ended handles.
    gone: AtomicBool,
}

#[derive(Debug)]
enum HandleState {
    Live(Pair),
    /// Aborted or closed, and why: the handles are nobody's any more.
    Ended(String),
}

#[derive(Debug)]
struct Pair {
    /// The non-blocking one.
    parent: Handle,
    /// The blocking one.
    worker: Handle,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) ncclComm_t);

// SAFETY: NCCL ties no communicator to a thread; `Handles` sees to it that they take turns.
unsafe impl Send for Handle {}

impl Handles {
    /// Meets the members that know `id`. For a thread whose context is the GPU's.
    ///
    /// # Errors
    /// NCCL refuses, or `end`, which is asked every millisecond, says why not to wait any longer.
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

    /// Runs `call`, which puts something on a stream.
    ///
    /// # Errors
    /// NCCL's, or why the communicator has ended.
    pub(super) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&Api, ncclComm_t) -> Code,
    ) -> Result<(), CudaError> {
        // Taken before the look at the state: who ends it waits for this lock before the handle goes.
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        let worker = match &*self.state() {
            HandleState::Live(pair) => pair.worker,
            HandleState::Ended(why) => return Err(CudaError::Refused(why.clone())),
        };
        let code = call(self.api, worker.0);
        match &*self.state() {
            _ if code == Code::SUCCESS => Ok(()),
            // What it failed with is the abort.
            HandleState::Ended(why) => Err(CudaError::Refused(why.clone())),
            HandleState::Live(_) => Err(self.api.error(name, code, Some(worker.0))),
        }
    }

    /// NCCL's error, if there is one by now and no call is being made, which would see it itself. For a
    /// thread whose context is the GPU's.
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

    /// Ends every call, on the GPU too; later ones fail with `reason`. The first end stands.
    pub(super) fn abort(&self, reason: &str) {
        let Some(Pair { parent, worker }) = self.end(reason) else {
            return;
        };
        let _ = self.context.scope(|| {
            // A call that is being made comes back.
            if let Some(calling) = abort_while(self.api, parent, || self.after_the_call()) {
                abort(self.api, worker);
                drop(calling);
            }
            Ok(())
        });
        self.gone.store(true, Ordering::Release);
    }

    /// The lock of calls, if it is free in time.
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

    /// Waits a moment until the thread that ended them has done so: a process that exits in the middle
    /// of `ncclCommAbort` crashes.
    pub(super) fn await_end(&self) {
        let deadline = Instant::now() + 2 * LINGER;
        while !self.gone.load(Ordering::Acquire) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends in order: waits a moment for the other members to do so too.
    pub(super) fn close(&self) {
        let Some(Pair { parent, worker }) = self.end("its group has ended") else {
            return;
        };
        let api = self.api;
        let context = self.context;
        let (done, finished) = mpsc::channel();
        let finalize = move || {
            // All of it, and not the handle's only field.
            let worker = worker;
            let _ = context.scope(|| {
                // SAFETY: the handle was taken out, and the caller holds the lock of calls.
                let code = unsafe { (api.comm_finalize)(worker.0) };
                // SAFETY: as above, and not used again.
                let code = code.and(|| unsafe { (api.comm_destroy)(worker.0) });
                warn_of(api, "closing a communicator", code);
                Ok(())
            });
            let _ = done.send(());
        };
        let _ = context.scope(|| {
            // (A call that does not come back, which an abort would have ended, keeps both.)
            let Some(_calling) = self.after_the_call() else {
                return Ok(());
            };
            // The blocking one waits for members that may not come.
            let thread = thread::Builder::new()
                .name("nccl-close".into())
                .spawn(finalize);
            if thread.is_ok() && finished.recv_timeout(LINGER).is_ok() {
                // SAFETY: the handle was taken out, has nothing under way and is not used again.
                warn_of(api, "ncclCommDestroy", unsafe {
                    (api.comm_destroy)(parent.0)
                });
            } else {
                // Aborted, the parent sets the flag that lets the other come back.
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

/// Aborts a communicator that nobody uses, and with it what is under way in those that were split from
/// it, for which `wait` waits: `None` if that did not come back.
fn abort_while<T>(api: &Api, parent: Handle, wait: impl FnOnce() -> Option<T>) -> Option<T> {
    // In a group NCCL sets the flag at once. What the parent shares with the others it lets go of at the
    // group's end, when nobody is about to use it any more.
    // SAFETY: a group has no conditions but its end.
    warn_of(api, "ncclGroupStart", unsafe { (api.group_start)() });
    abort(api, parent);
    let waited = wait();
    if waited.is_some() {
        // SAFETY: as above.
        warn_of(api, "ncclGroupEnd", unsafe { (api.group_end)() });
    } else {
        tracing::warn!("an NCCL call does not come back after its abort: its memory stays taken");
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

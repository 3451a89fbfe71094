//! NCCL's two handles of a communicator, and who may use them when.
//!
//! Calls are made with a *blocking* communicator: for each call of a non-blocking one NCCL starts a thread
//! and is asked until it is done, some 60 microseconds that are longer than a small collective. What
//! may wait for ever, the first meeting of the members, is done by a *non-blocking* one, which the other is
//! split from. It stays, for one thing: both have the same flag for an abort, so that aborting it, which
//! nobody uses, ends a call that another thread is making at that moment.

use std::{
    ffi::{c_char, c_int},
    ptr,
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};

use super::{
    Membership, UniqueId,
    api::{Api, Code},
    config::Config,
};
use crate::{CudaError, context::Context};

/// How long an orderly end waits for the other members, and an abort for a call that is being made.
const LINGER: Duration = Duration::from_secs(5);

/// The handles, which are used by one thread at a time and only while they are live.
#[derive(Debug)]
pub(super) struct Handles {
    api: &'static Api,
    context: Context,
    state: Mutex<State>,
    /// Held while a call is being made.
    calling: Mutex<()>,
    /// Whether NCCL has let go of ended handles.
    gone: AtomicBool,
}

#[derive(Debug)]
enum State {
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
struct Handle(ncclComm_t);

// SAFETY: NCCL ties no communicator to a thread; `State` is behind a lock.
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
        let parent = init(api, id, members)?;
        let met = settle(api, parent, "ncclCommInitRankConfig", end)
            .and_then(|()| split(api, parent, members, end));
        match met {
            Ok(worker) => {
                let state = Mutex::new(State::Live(Pair { parent, worker }));
                let (calling, gone) = (Mutex::default(), AtomicBool::new(false));
                Ok(Self { api, context, state, calling, gone })
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
            State::Live(pair) => pair.worker,
            State::Ended(why) => return Err(CudaError::Refused(why.clone())),
        };
        let code = call(self.api, worker.0);
        match &*self.state() {
            _ if code.is_fine() => Ok(()),
            // What it failed with is the abort.
            State::Ended(why) => Err(CudaError::Refused(why.clone())),
            State::Live(_) => Err(self.api.error(name, code, Some(worker.0))),
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
        let State::Live(Pair { worker, .. }) = &*self.state() else { return None };
        let code = async_error(self.api, *worker);
        (!code.is_fine()).then(|| self.api.error("NCCL", code, Some(worker.0)).to_string())
    }

    /// Ends every call, on the GPU too; later ones fail with `reason`. The first end stands.
    pub(super) fn abort(&self, reason: &str) {
        let Some(Pair { parent, worker }) = self.end(reason) else { return };
        let _ = self.context.scope(|| {
            // A call that is being made comes back.
            let calling = abort_while(self.api, parent, || self.after_the_call());
            abort(self.api, worker);
            drop(calling);
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
        let deadline = Instant::now() + LINGER;
        while !self.gone.load(Ordering::Acquire) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends in order: waits a moment for the other members to do so too.
    pub(super) fn close(&self) {
        let Some(Pair { parent, worker }) = self.end("its group has ended") else { return };
        let (api, context) = (self.api, self.context);
        let (done, finished) = mpsc::channel();
        let finalize = move || {
            // All of it, and not the handle's only field.
            let worker = worker;
            let _ = context.scope(|| {
                // SAFETY: the handle was taken out, so that nobody else uses it.
                let code = unsafe { (api.comm_finalize)(worker.0) };
                // SAFETY: as above, and not used again.
                let code = code.and(|| unsafe { (api.comm_destroy)(worker.0) });
                warn_of(api, "closing a communicator", code);
                Ok(())
            });
            let _ = done.send(());
        };
        // The blocking one waits for members that may not come.
        let thread = thread::Builder::new().name("nccl-close".into()).spawn(finalize);
        let in_order = thread.is_ok() && finished.recv_timeout(LINGER).is_ok();
        let _ = context.scope(|| {
            match in_order {
                // SAFETY: the handle was taken out and is not used again.
                true => warn_of(api, "ncclCommDestroy", unsafe { (api.comm_destroy)(parent.0) }),
                // The other one's end comes back.
                false => abort_while(api, parent, || _ = finished.recv_timeout(LINGER)),
            }
            Ok(())
        });
        self.gone.store(true, Ordering::Release);
    }

    /// Whether it was aborted or closed.
    pub(super) fn has_ended(&self) -> bool {
        matches!(&*self.state(), State::Ended(_))
    }

    fn end(&self, reason: &str) -> Option<Pair> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Ended(reason.to_string())) {
            State::Live(pair) => Some(pair),
            ended @ State::Ended(_) => {
                *state = ended;
                None
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts joining. NCCL hands the communicator out at once.
fn init(api: &Api, id: UniqueId, members: Membership) -> Result<Handle, CudaError> {
    let id = ncclUniqueId { internal: id.0.map(|byte| byte as c_char) };
    let (size, rank) = (number(members.size)?, number(members.rank)?);
    let mut comm: ncclComm_t = ptr::null_mut();
    let mut config = Config::non_blocking();
    // SAFETY: NCCL writes the handle through the first pointer and reads as much of the config as
    // its field `size` says; both outlive the call.
    let code = unsafe { (api.comm_init_rank_config)(&mut comm, size, id, rank, &mut config) };
    match code.is_fine() && !comm.is_null() {
        true => Ok(Handle(comm)),
        false => Err(api.error("ncclCommInitRankConfig", code, None)),
    }
}

/// A blocking communicator of all members of `parent`.
fn split(
    api: &Api,
    parent: Handle,
    members: Membership,
    end: &impl Fn() -> Option<String>,
) -> Result<Handle, CudaError> {
    let rank = number(members.rank)?;
    // NCCL's thread writes the handle and reads the config when the members are there, which may be
    // after this one has given up: then the place stays.
    let place = Box::into_raw(Box::new((ptr::null_mut() as ncclComm_t, Config::blocking())));
    // SAFETY: both parts of the place live until NCCL is done with them.
    let code =
        unsafe { (api.comm_split)(parent.0, 0, rank, &raw mut (*place).0, &raw mut (*place).1) };
    if !code.is_fine() {
        return Err(api.error("ncclCommSplit", code, Some(parent.0)));
    }
    settle(api, parent, "ncclCommSplit", end)?;
    // SAFETY: it came from a box, and NCCL is done with it.
    let (comm, _) = *unsafe { Box::from_raw(place) };
    match comm.is_null() {
        false => Ok(Handle(comm)),
        true => Err(CudaError::Refused("ncclCommSplit gave no communicator".into())),
    }
}

/// Waits until what is under way is done.
fn settle(
    api: &Api,
    comm: Handle,
    name: &'static str,
    end: &impl Fn() -> Option<String>,
) -> Result<(), CudaError> {
    loop {
        match async_error(api, comm) {
            Code::SUCCESS => return Ok(()),
            Code::IN_PROGRESS => {}
            code => return Err(api.error(name, code, Some(comm.0))),
        }
        if let Some(why) = end() {
            return Err(CudaError::Refused(why));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// What is under way ended with, or that it has not.
fn async_error(api: &Api, comm: Handle) -> Code {
    let mut state = Code::SUCCESS;
    // SAFETY: the communicator is live, as the caller sees to; NCCL writes the state through the
    // pointer.
    let code = unsafe { (api.comm_get_async_error)(comm.0, &mut state) };
    if code == Code::SUCCESS { state } else { code }
}

/// Aborts a communicator that nobody uses, and with it what is under way in those that were split from
/// it, for which `wait` waits.
fn abort_while<T>(api: &Api, parent: Handle, wait: impl FnOnce() -> T) -> T {
    // In a group NCCL sets the flag at once. What the parent shares with the others it lets go of at the
    // group's end, when nobody is about to use it any more.
    // SAFETY: a group has no conditions but its end.
    warn_of(api, "ncclGroupStart", unsafe { (api.group_start)() });
    abort(api, parent);
    let waited = wait();
    // SAFETY: as above.
    warn_of(api, "ncclGroupEnd", unsafe { (api.group_end)() });
    waited
}

/// Aborts a communicator that nobody uses from now on.
fn abort(api: &Api, comm: Handle) {
    // SAFETY: the handle was taken out, so that nobody else uses it.
    warn_of(api, "ncclCommAbort", unsafe { (api.comm_abort)(comm.0) });
}

fn warn_of(api: &Api, call: &'static str, code: Code) {
    if !code.is_fine() {
        tracing::warn!("{}", api.error(call, code, None));
    }
}

fn number(number: usize) -> Result<c_int, CudaError> {
    c_int::try_from(number).map_err(|_| CudaError::Refused(format!("{number} ranks")))
}

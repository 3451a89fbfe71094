use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::nccl::sys::ncclComm_t;

use super::api::{Api, Code};
use crate::{
    CudaError,
    context::Context,
    events::{Event, PooledEvent},
    streams::Stream,
};

/// How long an orderly end waits for the other members.
const LINGER: Duration = Duration::from_secs(5);
/// Spins before a wait for NCCL sleeps between looks: starting a kernel takes some tens of
/// microseconds, connecting to peers milliseconds.
const SPINS: u32 = 20_000;

/// NCCL's handle, and the calls that were made with it. The device thread makes calls and waits for
/// their start, the watchdog looks on and aborts; the handle is used by one at a time, and only while
/// it is live.
#[derive(Debug)]
pub(super) struct Calls {
    api: &'static Api,
    context: Context,
    state: Mutex<State>,
    log: Mutex<Log>,
    /// Whether NCCL has let go of an ended handle.
    gone: AtomicBool,
}

#[derive(Debug)]
enum State {
    Live(Handle),
    /// Aborted or closed, and why: the handle is nobody's any more.
    Ended(String),
}

#[derive(Debug)]
struct Handle(ncclComm_t);

// SAFETY: NCCL ties no communicator to a thread; `State` is behind a lock.
unsafe impl Send for Handle {}

#[derive(Debug, Default)]
struct Log {
    /// The call that is being started.
    starting: Option<(u64, Instant)>,
    /// Calls on the GPU, oldest first.
    running: VecDeque<(u64, Arc<PooledEvent>, Instant)>,
    /// The first failure.
    fault: Option<String>,
}

/// What a look at the calls found.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Calls that the GPU has finished since the last look.
    pub(super) finished: Vec<u64>,
    /// The oldest call that is not finished, and when it was made.
    pub(super) oldest: Option<(u64, Instant)>,
    /// The first failure, if any.
    pub(super) fault: Option<String>,
}

impl Calls {
    pub(super) fn new(api: &'static Api, context: Context, comm: ncclComm_t) -> Self {
        let state = Mutex::new(State::Live(Handle(comm)));
        Self { api, context, state, log: Mutex::default(), gone: AtomicBool::new(false) }
    }

    pub(super) fn context(&self) -> Context {
        self.context
    }

    /// Makes call `id`, waits until it is on `stream`, and returns the point behind it. For the
    /// device thread.
    ///
    /// # Errors
    /// NCCL's, or why the communicator has ended.
    pub(super) fn make(
        &self,
        id: u64,
        stream: Stream,
        call: impl FnOnce(&Api, ncclComm_t) -> Code,
    ) -> Result<Arc<PooledEvent>, CudaError> {
        let began = Instant::now();
        self.log().starting = Some((id, began));
        let made = self.start("an NCCL call", call);
        let made = made.and_then(|()| Event::record(stream)).map(Arc::new);
        let mut log = self.log();
        log.starting = None;
        match &made {
            Ok(event) => log.running.push_back((id, event.clone(), began)),
            Err(error) => _ = log.fault.get_or_insert(error.to_string()),
        }
        made
    }

    /// Runs `call` and waits until NCCL has started what it asks for.
    fn start(
        &self,
        name: &'static str,
        call: impl FnOnce(&Api, ncclComm_t) -> Code,
    ) -> Result<(), CudaError> {
        let code = self.with(|comm| call(self.api, comm))?;
        if !code.is_fine() {
            return Err(self.with(|comm| self.api.error(name, code, Some(comm)))?);
        }
        let mut looks = 0;
        while code == Code::IN_PROGRESS && !self.is_settled(name)? {
            looks += 1;
            match looks < SPINS {
                true => std::hint::spin_loop(),
                false => thread::sleep(Duration::from_micros(50)),
            }
        }
        Ok(())
    }

    /// Whether what is under way is done.
    ///
    /// # Errors
    /// It failed, or why the communicator has ended.
    pub(super) fn is_settled(&self, name: &'static str) -> Result<bool, CudaError> {
        match self.with(|comm| self.async_error(comm))? {
            Code::SUCCESS => Ok(true),
            Code::IN_PROGRESS => Ok(false),
            code => Err(self.with(|comm| self.api.error(name, code, Some(comm)))?),
        }
    }

    /// What is under way ended with, or that it has not.
    fn async_error(&self, comm: ncclComm_t) -> Code {
        let mut state = Code::SUCCESS;
        // SAFETY: the communicator is live, as the caller holds the lock; NCCL writes the state
        // through the pointer.
        let code = unsafe { (self.api.comm_get_async_error)(comm, &mut state) };
        if code == Code::SUCCESS { state } else { code }
    }

    fn with<T>(&self, use_it: impl FnOnce(ncclComm_t) -> T) -> Result<T, CudaError> {
        match &*self.state() {
            State::Live(handle) => Ok(use_it(handle.0)),
            State::Ended(why) => Err(CudaError::Refused(why.clone())),
        }
    }

    /// Notes that a call could not be made on this rank, which leaves its peers waiting.
    pub(super) fn note_fault(&self, why: &str) {
        self.log().fault.get_or_insert_with(|| why.to_string());
    }

    /// Looks at NCCL's state and at the calls on the GPU; nothing after the end. For a thread whose
    /// context is the GPU's.
    pub(super) fn look(&self) -> Look {
        // Busy: the device thread is making a call just now, and will see for itself.
        let state = match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let mut error = None;
        match state.as_deref() {
            Some(State::Ended(_)) => return Look::default(),
            Some(State::Live(handle)) => {
                let code = self.async_error(handle.0);
                if !code.is_fine() {
                    error = Some(self.api.error("NCCL", code, Some(handle.0)).to_string());
                }
            }
            None => {}
        }
        drop(state);
        let (mut log, mut fault) = (self.log(), None);
        let mut finished = Vec::new();
        while let Some((id, event, _)) = log.running.front() {
            match event.is_done() {
                Ok(true) => {
                    finished.push(*id);
                    log.running.pop_front();
                }
                Ok(false) => break,
                Err(error) => {
                    fault = Some(error.to_string());
                    break;
                }
            }
        }
        let running = log.running.front().map(|(id, _, began)| (*id, *began));
        let oldest = running.or(log.starting);
        // With nothing under way, an error is a peer's end, which is no trouble of this rank's.
        if let Some(fault) = fault.or(error.filter(|_| oldest.is_some())) {
            log.fault.get_or_insert(fault);
        }
        Look { finished, oldest, fault: log.fault.clone() }
    }

    /// Ends every call, on the GPU too; later ones fail with `reason`. The first end stands.
    pub(super) fn abort(&self, reason: &str) {
        let Some(Handle(comm)) = self.end(reason) else { return };
        let aborted = self.context.scope(|| {
            // SAFETY: the handle was taken out, so nobody else can use it.
            let code = unsafe { (self.api.comm_abort)(comm) };
            if code.is_fine() { Ok(()) } else { Err(self.api.error("ncclCommAbort", code, None)) }
        });
        self.gone.store(true, Ordering::Release);
        if let Err(error) = aborted {
            tracing::warn!("{error}");
        }
    }

    /// Waits a moment until the thread that ended it has done so: a process that exits in the middle
    /// of `ncclCommAbort` crashes.
    pub(super) fn await_end(&self) {
        let deadline = Instant::now() + LINGER;
        while !self.gone.load(Ordering::Acquire) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends in order: waits a moment for the other members to do so too.
    pub(super) fn close(&self) {
        let deadline = Instant::now() + LINGER;
        let finalized = self.context.scope(|| {
            // SAFETY: the communicator is live inside `with`.
            let mut code = self.with(|comm| unsafe { (self.api.comm_finalize)(comm) })?;
            while code == Code::IN_PROGRESS && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
                code = self.with(|comm| self.async_error(comm))?;
            }
            Ok(code == Code::SUCCESS)
        });
        if finalized != Ok(true) {
            return self.abort("its group ended before all members had closed it");
        }
        let Some(Handle(comm)) = self.end("its group has ended") else { return };
        let _ = self.context.scope(|| {
            // SAFETY: the handle was taken out, so nobody else can use it.
            let code = unsafe { (self.api.comm_destroy)(comm) };
            self.gone.store(true, Ordering::Release);
            if !code.is_fine() {
                tracing::warn!("{}", self.api.error("ncclCommDestroy", code, None));
            }
            Ok(())
        });
    }

    /// Whether it was aborted or closed, or a call failed.
    pub(super) fn is_over(&self) -> bool {
        self.log().fault.is_some() || matches!(&*self.state(), State::Ended(_))
    }

    fn end(&self, reason: &str) -> Option<Handle> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Ended(reason.to_string())) {
            State::Live(handle) => Some(handle),
            ended @ State::Ended(_) => {
                *state = ended;
                None
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

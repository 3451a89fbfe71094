use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use cudarc::nccl::sys::ncclComm_t;

use super::{
    api::{Api, Code},
    handles::Handles,
};
use crate::{
    context::Context,
    error::CudaError,
    events::{Event, PooledEvent},
    streams::Stream,
};

/// A communicator's handles, and a log of the calls made with them. The device thread makes the
/// calls; the watchdog observes and aborts them.
#[derive(Debug)]
pub(super) struct Calls {
    handles: Handles,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Log {
    /// The call that is being started, and when that began.
    starting: Option<(u64, Instant)>,
    /// The calls on the GPU, oldest first.
    running: VecDeque<(u64, Arc<PooledEvent>, Instant)>,
    /// The first failure.
    fault: Option<String>,
}

/// The state that the watchdog sees.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Calls that the GPU has finished since the previous look.
    pub(super) finished: Vec<u64>,
    /// The oldest unfinished call, and when it was made.
    pub(super) oldest: Option<(u64, Instant)>,
    /// The first failure, if any.
    pub(super) fault: Option<String>,
}

impl Calls {
    pub(super) fn new(handles: Handles) -> Self {
        Self {
            handles,
            log: Mutex::default(),
        }
    }

    pub(super) fn context(&self) -> Context {
        self.handles.context()
    }

    /// Makes call `id` and returns the event after it on `stream`. Call it on the device thread.
    ///
    /// # Errors
    /// NCCL fails, or the communicator has ended.
    pub(super) fn make(
        &self,
        id: u64,
        stream: Stream,
        call: impl FnOnce(&Api, ncclComm_t) -> Code,
    ) -> Result<Arc<PooledEvent>, CudaError> {
        let began = Instant::now();
        self.log().starting = Some((id, began));
        let made = self.handles.call("an NCCL call", call);
        let made = made.and_then(|()| Event::record(stream)).map(Arc::new);
        let mut log = self.log();
        log.starting = None;
        match &made {
            Ok(event) => log.running.push_back((id, event.clone(), began)),
            Err(error) => _ = log.fault.get_or_insert(error.to_string()),
        }
        made
    }

    /// Records that a call could not be made on this rank, which leaves its peers waiting.
    pub(super) fn note_fault(&self, why: &str) {
        self.log().fault.get_or_insert_with(|| why.to_string());
    }

    /// Checks NCCL's state and the calls on the GPU; returns an empty report after the communicator
    /// has ended. The calling thread must have the GPU's context current.
    pub(super) fn look(&self) -> Look {
        if self.handles.has_ended() {
            return Look::default();
        }
        let error = self.handles.fault();
        let mut log = self.log();
        let mut fault = None;
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
        // If nothing is in flight, an error means that a peer has ended, which does not affect this
        // rank.
        if let Some(fault) = fault.or(error.filter(|_| oldest.is_some())) {
            log.fault.get_or_insert(fault);
        }
        Look {
            finished,
            oldest,
            fault: log.fault.clone(),
        }
    }

    /// Ends all calls, including those on the GPU; later calls fail with `reason`. Only the first
    /// abort or close has an effect.
    pub(super) fn abort(&self, reason: &str) {
        self.handles.abort(reason);
    }

    /// Waits for a limited time until the thread that is ending the communicator is done.
    pub(super) fn await_end(&self) {
        self.handles.await_end();
    }

    /// Closes the communicator in order; waits for a limited time until the other members do so,
    /// too.
    pub(super) fn close(&self) {
        self.handles.close();
    }

    /// Whether it was aborted or closed, or a call has failed.
    pub(super) fn is_over(&self) -> bool {
        self.log().fault.is_some() || self.handles.has_ended()
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

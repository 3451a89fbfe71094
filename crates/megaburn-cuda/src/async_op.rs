//! Work on other streams than CubeCL's, and how CubeCL's stream waits for it.

use std::sync::{Arc, Mutex, PoisonError};

use burn_cubecl::tensor::CubeTensor;

use crate::{
    events::PooledEvent,
    queue::{CudaQueue, Op, Retained},
};

/// Started work on another stream, whose result is available after waiting for it.
#[derive(Debug)]
#[must_use = "call `wait` to get the result"]
pub struct AsyncOp {
    /// Declared before the result, so that the result's memory is not reused before the wait.
    join: Option<Join>,
    out: CubeTensor,
}

impl AsyncOp {
    /// Wraps a result that needs no waiting: it comes from in-order work, or is computed from such
    /// results.
    pub fn done(out: CubeTensor) -> Self {
        Self { out, join: None }
    }

    /// Wraps the result of work that is joined later.
    pub(crate) fn overlapped(out: CubeTensor, join: Join) -> Self {
        Self {
            out,
            join: Some(join),
        }
    }

    /// The memory of the result, which is not valid yet; for work that is enqueued after
    /// [`wait`](Self::wait).
    pub fn peek(&self) -> CubeTensor {
        self.out.clone()
    }

    /// Returns the result. Later work on the GPU waits for it; the host does not.
    pub fn wait(self) -> CubeTensor {
        drop(self.join);
        self.out
    }
}

/// Makes CubeCL's stream wait for work on another stream when it is dropped. Until then the buffers
/// of the work are neither freed nor moved.
#[derive(Debug)]
pub(crate) struct Join {
    queue: CudaQueue,
    name: Arc<str>,
    done: Done,
    retained: Retained,
}

/// The event recorded after the work, once the device thread has recorded it.
pub(crate) type Done = Arc<Mutex<Option<Arc<PooledEvent>>>>;

impl Join {
    pub(crate) fn new(queue: CudaQueue, name: Arc<str>, done: Done, retained: Retained) -> Self {
        Self {
            queue,
            name,
            done,
            retained,
        }
    }
}

impl Drop for Join {
    fn drop(&mut self) {
        let name = self.name.clone();
        let done = self.done.clone();
        let retained = std::mem::take(&mut self.retained);
        // The join uses no buffers, so it runs even if the call failed.
        self.queue.enqueue(
            Op::new(move || format!("join of {name}")),
            move |stream, _| {
                let done = done.lock().unwrap_or_else(PoisonError::into_inner).take();
                let joined = done.map_or(Ok(()), |event| event.blocks_stream(stream));
                drop(retained);
                joined
            },
        );
    }
}

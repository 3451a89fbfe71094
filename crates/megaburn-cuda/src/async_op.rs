//! Work on other streams than CubeCL's, and how that waits for it.

use std::sync::{Arc, Mutex, PoisonError};

use burn_cubecl::tensor::CubeTensor;

use crate::{CudaQueue, Op, Retained, events::PooledEvent};

/// Work on another stream that was started: its result, once waited for.
#[derive(Debug)]
#[must_use = "what the work gives is had by waiting for it"]
pub struct AsyncOp {
    /// Before the result, so that its memory is nobody else's until it was waited for.
    join: Option<Join>,
    out: CubeTensor,
}

impl AsyncOp {
    /// A result that is there for whatever comes after it: of work in order, or computed from
    /// some.
    pub fn done(out: CubeTensor) -> Self {
        Self { out, join: None }
    }

    /// The result of work that is joined later.
    pub(crate) fn overlapped(out: CubeTensor, join: Join) -> Self {
        Self {
            out,
            join: Some(join),
        }
    }

    /// The memory of the result, which is not there yet: for what is enqueued behind
    /// [`wait`](Self::wait).
    pub fn peek(&self) -> CubeTensor {
        self.out.clone()
    }

    /// The result. What is computed from now on waits for it on the GPU; the host does not.
    pub fn wait(self) -> CubeTensor {
        drop(self.join);
        self.out
    }
}

/// Lets CubeCL's stream wait for work on another one, when dropped: the buffers of the work stay
/// where they are until then.
#[derive(Debug)]
pub(crate) struct Join {
    queue: CudaQueue,
    name: Arc<str>,
    done: Done,
    retained: Retained,
}

/// The point behind the work, once the device thread has made it.
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
        // It touches no buffer, so that it runs even where the call failed.
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

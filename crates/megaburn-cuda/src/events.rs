//! Events: points in a stream that other streams and threads can wait for, taken from a pool.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUevent, CUresult};

use crate::{error::CudaError, streams::Stream};

/// Unused events of this process's context. Creating an event costs microseconds; re-recording one
/// does not.
static FREE: Mutex<Vec<Event>> = Mutex::new(Vec::new());

/// A recorded point in a stream. It is valid on threads whose current context is the device's.
#[derive(Debug)]
pub struct Event(Handle);

#[derive(Debug)]
struct Handle(CUevent);

// SAFETY: an event handle is a name that the driver accepts from every thread.
unsafe impl Send for Handle {}
// SAFETY: as above; recording and waiting are thread-safe in the driver.
unsafe impl Sync for Handle {}

impl Event {
    /// Records the point that `stream` has reached by now.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn record(stream: Stream) -> Result<PooledEvent, CudaError> {
        let event = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = PooledEvent(Some(event.map_or_else(Self::create, Ok)?));
        // SAFETY: event and stream are live handles of this context.
        unsafe { sys::cuEventRecord(event.handle(), stream.0) }
            .result()
            .map_err(CudaError::driver("cuEventRecord"))?;
        Ok(event)
    }

    fn create() -> Result<Self, CudaError> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the driver writes the new handle through the pointer.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(CudaError::driver("cuEventCreate"))?;
        Ok(Self(Handle(event)))
    }
}

impl Stream {
    /// Makes all later work on this stream wait for all work on `other` so far.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn wait_for(self, other: Self) -> Result<(), CudaError> {
        let event = Event::record(other)?;
        event.blocks_stream(self)
    }
}

/// An event borrowed from the pool; dropping it returns it. Work that already waits for it keeps
/// waiting for the point that was recorded.
#[derive(Debug)]
pub struct PooledEvent(Option<Event>);

impl PooledEvent {
    fn handle(&self) -> CUevent {
        self.0.as_ref().expect("it is taken only in drop").0.0
    }

    /// Makes all work that is enqueued on `stream` from now on wait for this point.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn blocks_stream(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: event and stream are live handles of this context.
        unsafe { sys::cuStreamWaitEvent(stream.0, self.handle(), 0) }
            .result()
            .map_err(CudaError::driver("cuStreamWaitEvent"))
    }

    /// Blocks the calling thread until the device has passed this point. Use it for checkpoints,
    /// not in steps.
    ///
    /// # Errors
    /// A driver error, which any earlier work may have caused.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is a live handle of this context.
        unsafe { sys::cuEventSynchronize(self.handle()) }
            .result()
            .map_err(CudaError::driver("cuEventSynchronize"))
    }

    /// Whether the device has passed this point.
    ///
    /// # Errors
    /// A driver error, which any earlier work may have caused.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is a live handle of this context.
        match unsafe { sys::cuEventQuery(self.handle()) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other
                .result()
                .map(|()| true)
                .map_err(CudaError::driver("cuEventQuery")),
        }
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        FREE.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(self.0.take());
    }
}

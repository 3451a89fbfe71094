//! Streams: CubeCL's own, as enqueued work sees it, and others beside it.

use cudarc::driver::sys::{self, CUstream};

use crate::{CudaError, events::Event};

/// A stream that work is put on. Valid on the device thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub CUstream);

// SAFETY: a stream handle is a name that the driver accepts from every thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serialises what is put on one stream.
unsafe impl Sync for Stream {}

/// Which of several streams with work the GPU serves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// As CubeCL's own.
    Normal,
    /// Before all others: for communication, whose few thread blocks hold up other ranks.
    High,
}

impl Stream {
    /// A further stream of the current context, which does not wait for the default stream.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn create(priority: Priority) -> Result<Self, CudaError> {
        let mut least = 0;
        let mut greatest = 0;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the driver writes through both pointers, which outlive the call.
        unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }
            .result()
            .map_err(CudaError::driver("cuCtxGetStreamPriorityRange"))?;
        let level = if priority == Priority::High {
            greatest
        } else {
            least
        };
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes the new handle through the pointer.
        unsafe { sys::cuStreamCreateWithPriority(&mut stream, flags, level) }
            .result()
            .map_err(CudaError::driver("cuStreamCreateWithPriority"))?;
        Ok(Self(stream))
    }

    /// Lets what is put on this stream from now on wait until what is on `other` by now is done.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn wait_for(self, other: Self) -> Result<(), CudaError> {
        let event = Event::record(other)?;
        event.blocks_stream(self)
    }

    /// Waits until everything on the stream is done. For teardown and measurements.
    ///
    /// # Errors
    /// The driver's, which may be of any work before.
    pub fn synchronize(self) -> Result<(), CudaError> {
        // SAFETY: the handle is of a live stream of this context.
        unsafe { sys::cuStreamSynchronize(self.0) }
            .result()
            .map_err(CudaError::driver("cuStreamSynchronize"))
    }

    /// Gives a stream of [`Stream::create`] back, once its work is done.
    pub(crate) fn destroy(self) -> Result<(), CudaError> {
        // SAFETY: the handle is of a live stream of this context, which nobody uses again.
        unsafe { sys::cuStreamDestroy_v2(self.0) }
            .result()
            .map_err(CudaError::driver("cuStreamDestroy"))
    }
}

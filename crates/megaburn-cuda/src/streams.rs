//! Streams: CubeCL's own, which enqueued work gets, and additional ones.

use cudarc::driver::sys::{self, CUstream};

use crate::error::CudaError;

/// A stream to enqueue work on. It is valid on the device thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub CUstream);

// SAFETY: a stream handle is a name that the driver accepts from every thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serializes the work that is put on one stream.
unsafe impl Sync for Stream {}

/// The priority with which the GPU serves a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// The priority of CubeCL's own stream.
    Normal,
    /// The highest priority: for communication, whose few thread blocks would delay other ranks.
    High,
}

impl Stream {
    /// Creates another stream in the current context, which does not synchronize with the default
    /// stream.
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

    /// Waits until all work on the stream is done. Use it for teardown and benchmarks.
    ///
    /// # Errors
    /// A driver error, which any earlier work may have caused.
    pub fn synchronize(self) -> Result<(), CudaError> {
        // SAFETY: the handle is of a live stream of this context.
        unsafe { sys::cuStreamSynchronize(self.0) }
            .result()
            .map_err(CudaError::driver("cuStreamSynchronize"))
    }

    /// Destroys a stream of [`Stream::create`], once its work is done.
    pub(crate) fn destroy(self) -> Result<(), CudaError> {
        // SAFETY: the handle is of a live stream of this context, which is not used again.
        unsafe { sys::cuStreamDestroy_v2(self.0) }
            .result()
            .map_err(CudaError::driver("cuStreamDestroy"))
    }
}

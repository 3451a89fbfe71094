//! Marks the part of a run that NVIDIA's profilers record (`ncu --profile-from-start off`).

use cudarc::driver::sys;

use crate::{error::CudaError, queue::CudaQueue};

/// Runs `work` with the profiler on, so that it records exactly the GPU work of `work`. Waits for
/// the device thread before and after.
///
/// # Errors
/// The driver refuses.
pub fn captured<T>(queue: &CudaQueue, work: impl FnOnce() -> T) -> Result<T, CudaError> {
    queue.on_device_thread(|| {
        // SAFETY: the call takes no arguments and touches no memory of ours; the context is
        // current.
        unsafe { sys::cuProfilerStart() }
            .result()
            .map_err(CudaError::driver("cuProfilerStart"))
    })?;
    let done = work();
    queue.on_device_thread(|| {
        // SAFETY: as above.
        unsafe { sys::cuProfilerStop() }
            .result()
            .map_err(CudaError::driver("cuProfilerStop"))
    })?;
    Ok(done)
}

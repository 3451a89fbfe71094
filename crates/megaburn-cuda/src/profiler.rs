//! Marks the part of a run that NVIDIA's profilers look at (`ncu --profile-from-start off`).

use cudarc::driver::sys;

use crate::{CudaError, CudaQueue};

/// Runs `work` with the profiler on, which then sees everything that the GPU does for it and nothing
/// else. Waits for the device thread before and after.
///
/// # Errors
/// The driver refuses.
pub fn captured<T>(queue: &CudaQueue, work: impl FnOnce() -> T) -> Result<T, CudaError> {
    queue.on_device_thread(|| {
        // SAFETY: takes nothing and touches no memory of ours; the context is current.
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

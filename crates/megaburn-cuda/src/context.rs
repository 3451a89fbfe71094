//! The context of a GPU, for threads other than its device thread.

use cubecl_common::device::DeviceId;
use cudarc::driver::{
    result::{device, primary_ctx},
    sys::{self, CUcontext},
};

use crate::error::CudaError;

/// The primary context of a GPU, which CubeCL and all CUDA libraries share. It is never released
/// during the life of the process; CubeCL keeps it, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(CUcontext);

// SAFETY: a context handle is a name that the driver accepts from every thread.
unsafe impl Send for Context {}
// SAFETY: as above; making it current changes the calling thread only.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of the GPU with CubeCL's id `id`.
    ///
    /// # Errors
    /// The driver refuses.
    pub(crate) fn of(id: DeviceId) -> Result<Self, CudaError> {
        let device =
            device::get(i32::from(id.index_id)).map_err(CudaError::driver("cuDeviceGet"))?;
        // SAFETY: the device comes from `device::get`.
        let context = unsafe { primary_ctx::retain(device) };
        context
            .map(Self)
            .map_err(CudaError::driver("cuDevicePrimaryCtxRetain"))
    }

    /// Makes this the current context of the calling thread.
    ///
    /// # Errors
    /// The driver refuses.
    pub(crate) fn bind(self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { sys::cuCtxSetCurrent(self.0) }
            .result()
            .map_err(CudaError::driver("cuCtxSetCurrent"))
    }

    /// Runs `body` with this context current, and then restores the previous context.
    ///
    /// # Errors
    /// `body` fails, or the driver refuses.
    pub(crate) fn scope<T>(
        self,
        body: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        /// Restores the previous context, also after a panic.
        struct Pop;
        impl Drop for Pop {
            fn drop(&mut self) {
                let mut popped = std::ptr::null_mut();
                // SAFETY: the driver writes the handle through the pointer.
                let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
            }
        }
        // SAFETY: the context is retained.
        unsafe { sys::cuCtxPushCurrent_v2(self.0) }
            .result()
            .map_err(CudaError::driver("cuCtxPushCurrent"))?;
        let _pop = Pop;
        body()
    }
}

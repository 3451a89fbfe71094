//! Named time ranges for NVIDIA's profilers (Nsight Systems, `nsys profile --trace=nvtx,cuda`).
//!
//! They need the feature `nvtx` and `libnvToolsExt.so` on the machine (part of CUDA 12 and of
//! Nsight Systems); otherwise they have no effect.

/// A time range that ends when it is dropped.
#[derive(Debug)]
#[must_use = "the range ends when this is dropped"]
pub struct Range {
    #[cfg(feature = "nvtx")]
    _range: Option<cudarc::nvtx::Range>,
}

/// Starts a time range on this thread. Kernels launched in it may run later; the profiler shows
/// both and links them.
pub fn range(name: &'static str) -> Range {
    #[cfg(not(feature = "nvtx"))]
    let _ = name;
    Range {
        #[cfg(feature = "nvtx")]
        _range: is_present().then(|| cudarc::nvtx::scoped_range(name)),
    }
}

#[cfg(feature = "nvtx")]
fn is_present() -> bool {
    static PRESENT: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    // SAFETY: loading the library runs its initializers, as the first use would.
    *PRESENT.get_or_init(|| unsafe { cudarc::nvtx::sys::is_culib_present() })
}

//! Names for the parts of a step in NVIDIA's profilers.

/// A part of a step, until it is dropped.
#[must_use = "the range ends when this is dropped"]
pub(crate) struct Range {
    #[cfg(feature = "cuda")]
    _range: megaburn_cuda::nvtx::Range,
}

/// Begins a part of a step. Without feature `nvtx` nothing happens.
pub(crate) fn range(name: &'static str) -> Range {
    #[cfg(not(feature = "cuda"))]
    let _ = name;
    Range {
        #[cfg(feature = "cuda")]
        _range: megaburn_cuda::nvtx::range(name),
    }
}

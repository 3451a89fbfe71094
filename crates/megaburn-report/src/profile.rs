//! Names the parts of a step in NVIDIA's profilers.

/// A named part of a step, which ends when this is dropped.
#[must_use = "the range ends when this is dropped"]
#[derive(Debug)]
pub struct Range {
    #[cfg(feature = "cuda")]
    _range: megaburn_cuda::nvtx::Range,
}

/// Begins a named part of a step. Without feature `nvtx` this does nothing.
pub fn range(name: &'static str) -> Range {
    #[cfg(not(feature = "cuda"))]
    let _ = name;
    Range {
        #[cfg(feature = "cuda")]
        _range: megaburn_cuda::nvtx::range(name),
    }
}

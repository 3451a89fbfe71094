use cudarc::{cublaslt::sys::cublasLtMatmulAlgo_t, driver::sys as cu};

use crate::{CudaError, streams::Stream, timing::Timer};

/// How many of cuBLASLt's suggestions are timed.
pub(super) const CANDIDATES: usize = 8;
/// Rounds over all suggestions: neighbours in time meet the same clocks.
const ROUNDS: usize = 7;
/// A suggestion must be this much faster than an earlier one to be taken: the order is cuBLASLt's
/// own estimate, and a timing is noisy.
const CLEARLY: f32 = 0.97;

/// The fastest algorithm on the matrices at hand, the result written to memory of its own; `None` if
/// there is no choice, no such memory, or the clock cannot be read.
///
/// Waits for the device: once for each new shape.
pub(super) fn fastest(
    stream: Stream,
    candidates: &[cublasLtMatmulAlgo_t],
    out_bytes: u64,
    mut launch: impl FnMut(cublasLtMatmulAlgo_t, u64) -> Result<(), CudaError>,
) -> Option<cublasLtMatmulAlgo_t> {
    if candidates.len() < 2 {
        return None;
    }
    let scratch = Scratch::new(out_bytes)?;
    let timer = Timer::new().ok()?;
    let mut times = vec![Vec::with_capacity(ROUNDS); candidates.len()];
    for _ in 0..ROUNDS {
        for (&candidate, times) in candidates.iter().zip(&mut times) {
            timer.start(stream).ok()?;
            // One that cuBLASLt suggests and then refuses is no candidate.
            times.push(match launch(candidate, scratch.0) {
                Ok(()) => timer.stop(stream).and_then(|()| timer.milliseconds()).ok()?,
                Err(_) => f32::INFINITY,
            });
        }
    }
    let mut best: Option<(f32, cublasLtMatmulAlgo_t)> = None;
    for (&candidate, times) in candidates.iter().zip(&mut times) {
        times.sort_by(f32::total_cmp);
        let median = times[ROUNDS / 2];
        if best.is_none_or(|(time, _)| median < time * CLEARLY) {
            best = Some((median, candidate));
        }
    }
    best.filter(|(time, _)| time.is_finite()).map(|(_, algorithm)| algorithm)
}

/// Device memory of its own, beside CubeCL's.
struct Scratch(u64);

impl Scratch {
    fn new(bytes: u64) -> Option<Self> {
        let mut ptr = 0;
        // SAFETY: the driver writes the new address through the pointer; the context is current.
        let status = unsafe { cu::cuMemAlloc_v2(&mut ptr, usize::try_from(bytes).ok()?) };
        status.result().is_ok().then_some(Self(ptr))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the memory is this value's own; the driver waits for what uses it.
        let _ = unsafe { cu::cuMemFree_v2(self.0) };
    }
}

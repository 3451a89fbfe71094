use cudarc::{cublaslt::sys::cublasLtMatmulAlgo_t, driver::sys as cu};

use super::options::Tuning;
use crate::{error::CudaError, streams::Stream, timing::Timer};

/// The number of rounds over all suggestions. Each round times all of them in sequence, so that
/// they run under about the same GPU clocks.
const ROUNDS: usize = 7;
/// The number of rounds for products that take [`LONG`]; they can be timed precisely.
const FEW_ROUNDS: usize = 3;
/// The threshold for [`FEW_ROUNDS`], in milliseconds.
const LONG: f32 = 20.0;
/// A suggestion is dropped once its fastest of at least two timings exceeds the best time by this
/// factor.
const HOPELESS: f32 = 1.15;
/// Finds the fastest algorithm on the given matrices; the results go to scratch memory. Returns
/// `None` if there is no choice, if there is not enough memory, or if the timer fails.
///
/// Waits for the device, once for each new shape.
pub(super) fn fastest(
    stream: Stream,
    candidates: &[cublasLtMatmulAlgo_t],
    out_bytes: u64,
    tuning: Tuning,
    mut launch: impl FnMut(cublasLtMatmulAlgo_t, u64) -> Result<(), CudaError>,
) -> Option<cublasLtMatmulAlgo_t> {
    if candidates.len() < 2 {
        return None;
    }
    let scratch = Scratch::new(out_bytes)?;
    let timer = Timer::new().ok()?;
    for &candidate in candidates {
        // Warm-up: the kernel may have to be loaded first, which must not be timed. Errors are
        // handled below.
        let _ = launch(candidate, scratch.0);
    }
    let mut trials = vec![Trial::default(); candidates.len()];
    for round in 0..ROUNDS {
        if is_enough(&trials, round) {
            break;
        }
        let fastest = fastest_of(&trials);
        for (&candidate, trial) in candidates.iter().zip(&mut trials) {
            if trial.is_hopeless(fastest) {
                continue;
            }
            timer.start(stream).ok()?;
            // cuBLASLt sometimes suggests an algorithm and then refuses it.
            trial.0.push(match launch(candidate, scratch.0) {
                Ok(()) => timer
                    .stop(stream)
                    .and_then(|()| timer.milliseconds())
                    .ok()?,
                Err(_) => f32::INFINITY,
            });
        }
    }
    best(&trials, tuning.clearly).map(|index| candidates[index])
}

/// The timings of one suggestion, in milliseconds.
#[derive(Clone, Debug, Default)]
struct Trial(Vec<f32>);

impl Trial {
    fn fastest(&self) -> f32 {
        self.0.iter().copied().fold(f32::INFINITY, f32::min)
    }

    fn median(&self) -> f32 {
        let mut times = self.0.clone();
        times.sort_by(f32::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f32::INFINITY)
    }

    /// Whether this suggestion can no longer become the best, given the fastest time of all.
    fn is_hopeless(&self, fastest: f32) -> bool {
        self.0.len() > 1 && self.fastest() > HOPELESS * fastest
    }
}

fn fastest_of(trials: &[Trial]) -> f32 {
    trials
        .iter()
        .map(Trial::fastest)
        .fold(f32::INFINITY, f32::min)
}

fn is_enough(trials: &[Trial], rounds: usize) -> bool {
    let all = trials
        .iter()
        .flat_map(|trial| &trial.0)
        .filter(|time| time.is_finite());
    rounds >= FEW_ROUNDS && all.sum::<f32>() >= LONG
}

/// The first suggestion with nearly the smallest median; `None` if none of them ran.
fn best(trials: &[Trial], clearly: f32) -> Option<usize> {
    let mut best: Option<(f32, usize)> = None;
    for (index, trial) in trials.iter().enumerate() {
        let median = trial.median();
        if best.is_none_or(|(time, _)| median < time * clearly) {
            best = Some((median, index));
        }
    }
    best.filter(|(time, _)| time.is_finite())
        .map(|(_, index)| index)
}

/// Scratch memory on the device, allocated outside CubeCL's pools.
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
        // SAFETY: this value owns the memory; the driver waits for work that uses it.
        let _ = unsafe { cu::cuMemFree_v2(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::INFINITY;

    fn trials(times: &[&[f32]]) -> Vec<Trial> {
        times.iter().map(|times| Trial(times.to_vec())).collect()
    }

    #[test]
    fn the_first_that_is_about_the_fastest_is_the_best() {
        let clearly = Tuning::default().clearly;
        let close = trials(&[&[1.0, 1.0], &[0.99, 0.98], &[2.0, 2.0]]);
        assert_eq!(
            (best(&close, clearly), best(&close, 0.995)),
            (Some(0), Some(1))
        );
        // A single outlier is ignored, and an algorithm that cannot run is never chosen.
        assert_eq!(
            best(
                &trials(&[&[NO, NO], &[1.0, 9.0, 1.0], &[1.2, 0.5, 1.2]]),
                clearly
            ),
            Some(1)
        );
        assert_eq!(best(&trials(&[&[NO, NO], &[NO, NO]]), clearly), None);
    }

    #[test]
    fn what_is_slow_twice_is_not_timed_again() {
        let all = trials(&[&[1.0, 1.3], &[1.2, 1.2], &[1.2, 1.1], &[1.2], &[NO, NO]]);
        let out: Vec<bool> = all
            .iter()
            .map(|trial| trial.is_hopeless(fastest_of(&all)))
            .collect();
        assert_eq!(out, [false, true, false, false, true]);
        let none = trials(&[&[NO, NO], &[NO, NO]]);
        assert!(!none[0].is_hopeless(fastest_of(&none)));
    }

    #[test]
    fn long_products_are_timed_less_often() {
        let all = trials(&[&[5.0; 3], &[9.0; 2], &[NO; 2]]);
        assert!(is_enough(&all, 3) && !is_enough(&all, 2));
        assert!(!is_enough(&trials(&[&[1.0; 6], &[1.0; 6]]), 6));
    }
}

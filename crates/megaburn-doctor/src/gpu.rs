//! What a GPU must answer and do to be examined.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use megaburn_collective::{CollectiveError, Group};

use crate::facts::{GpuFacts, LoadFacts, Slowdown};

/// How often a GPU is asked for its state while it computes.
const SAMPLES_EVERY: Duration = Duration::from_millis(50);

/// The state of a GPU at a moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadSample {
    /// Its clock in MHz.
    pub clock_mhz: Option<u32>,
    /// Its temperature.
    pub temperature_celsius: Option<u32>,
    /// The power that it draws.
    pub power_watts: Option<f64>,
    /// Why its clock is not higher.
    pub slowdowns: Vec<Slowdown>,
    /// The lanes of its PCIe connection.
    pub pcie_lanes: Option<u32>,
    /// The generation of its PCIe connection, which may be lower at rest.
    pub pcie_generation: Option<u32>,
}

/// A GPU that can be examined.
pub trait GpuUnderTest: Sync {
    /// Its readings before it computes anything.
    fn at_rest(&self) -> GpuFacts;

    /// Its state now; `None` if it cannot be read.
    fn sample(&self) -> Option<LoadSample>;

    /// Multiplies large matrices for about `seconds`, and returns the FLOP/s.
    ///
    /// # Errors
    /// Why it cannot.
    fn products(&self, seconds: f64) -> Result<f64, String>;

    /// Reads and writes its memory for about `seconds`, and returns the bytes per second.
    ///
    /// # Errors
    /// Why it cannot.
    fn memory(&self, seconds: f64) -> Result<f64, String>;

    /// The seconds of one all-reduce of `bytes` bytes, from `rounds` of them.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members of the group.
    fn all_reduce(&self, group: &Group, bytes: u64, rounds: usize) -> Result<f64, CollectiveError>;

    /// Why readings are missing, if they are.
    fn unread(&self) -> Option<String> {
        None
    }
}

/// Runs `work`, and observes the GPU meanwhile. The first tenth of the samples does not count,
/// because the clock rises in it.
pub(crate) fn under_load<T>(
    gpu: &dyn GpuUnderTest,
    work: impl FnOnce() -> T,
) -> (T, Option<LoadFacts>) {
    let is_over = AtomicBool::new(false);
    let samples = Mutex::new(Vec::new());
    let observe = || {
        while !is_over.load(Ordering::Relaxed) {
            thread::sleep(SAMPLES_EVERY);
            if let Some(sample) = gpu.sample() {
                let mut samples = samples.lock().unwrap_or_else(PoisonError::into_inner);
                samples.push(sample);
            }
        }
    };
    let result = thread::scope(|scope| {
        // Without a thread there are no samples.
        let _ = thread::Builder::new()
            .name("samples".into())
            .spawn_scoped(scope, observe);
        let result = work();
        is_over.store(true, Ordering::Relaxed);
        result
    });
    let samples = samples.into_inner().unwrap_or_else(PoisonError::into_inner);
    (result, summary(&samples))
}

fn summary(samples: &[LoadSample]) -> Option<LoadFacts> {
    // The last sample may be from after the work.
    let last = samples.len().saturating_sub(1).max(1).min(samples.len());
    let counted = &samples[(samples.len() / 10).min(last)..last];
    counted.last()?;
    let mut clocks: Vec<u32> = counted
        .iter()
        .filter_map(|sample| sample.clock_mhz)
        .collect();
    clocks.sort_unstable();
    let powers = counted.iter().filter_map(|sample| sample.power_watts);
    Some(LoadFacts {
        clock_mhz: clocks.get(clocks.len() / 2).copied(),
        temperature_celsius: counted
            .iter()
            .filter_map(|sample| sample.temperature_celsius)
            .max(),
        power_watts: powers.reduce(f64::max),
        slowdowns: counted
            .iter()
            .flat_map(|sample| sample.slowdowns.iter().copied())
            .collect(),
        pcie_lanes: counted.iter().filter_map(|sample| sample.pcie_lanes).max(),
        pcie_generation: counted
            .iter()
            .filter_map(|sample| sample.pcie_generation)
            .max(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_clock_counts_without_the_start_and_the_end() {
        let sample = |clock| LoadSample {
            clock_mhz: Some(clock),
            temperature_celsius: Some(clock / 30),
            slowdowns: vec![Slowdown::PowerLimit],
            ..LoadSample::default()
        };
        let clocks = [345, 1700, 1710, 1720, 1730, 1740, 1750, 1760, 1770, 345];
        let found = summary(&clocks.map(sample)).unwrap();
        assert_eq!(found.clock_mhz, Some(1740));
        assert_eq!(found.temperature_celsius, Some(1770 / 30));
        assert_eq!(found.slowdowns, [Slowdown::PowerLimit].into());
        assert_eq!(summary(&[]), None);
        assert_eq!(summary(&[sample(900)]).unwrap().clock_mhz, Some(900));
    }
}

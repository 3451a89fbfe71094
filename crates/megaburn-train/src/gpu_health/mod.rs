//! Watches the GPUs of a run while it trains: clocks, temperatures, and errors.
//!
//! A thread of each rank reads its GPU through NVML and warns at once. Every
//! `train.gpu_health_interval` steps rank 0 gathers what the ranks have seen.

mod seen;
mod summary;
mod watch;

use megaburn_collective::{CollectiveError, Group, host_name, objects};

use seen::Seen;
pub(crate) use summary::GpuHealthSummary;
use watch::GpuWatch;

/// The health of this rank's GPU, and on rank 0 of all.
#[derive(Debug)]
pub(crate) struct GpuHealthReports {
    interval: u64,
    /// The number of the GPU on the host; `None` without GPUs.
    gpu: Option<usize>,
    watch: Option<GpuWatch>,
}

impl GpuHealthReports {
    /// Reports every `interval` steps (0: never). `gpu` is the number of this rank's GPU on its host,
    /// and `index` that in this process.
    pub(crate) fn new(interval: u64, rank: usize, gpu: Option<usize>, index: usize) -> Self {
        let gpu = gpu.filter(|_| interval > 0);
        Self {
            interval,
            gpu,
            watch: gpu.and_then(|_| GpuWatch::start(rank, index)),
        }
    }

    /// Gathers what the ranks have seen, if step `step` ends an interval. Returns it on rank 0.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks, with the same `step`; a few hundred bytes go to rank 0.
    pub(crate) fn gather(
        &self,
        step: u64,
        world: &Group,
    ) -> Result<Option<GpuHealthSummary>, CollectiveError> {
        let Some(gpu) = self.gpu.filter(|_| step.is_multiple_of(self.interval)) else {
            return Ok(None);
        };
        let (last, events) = self.watch.as_ref().map(GpuWatch::take).unwrap_or_default();
        let mine = Seen {
            host: host_name(),
            gpu,
            last,
            events,
        };
        let all = objects::gather(world, &mine)?;
        Ok((world.rank() == 0).then(|| GpuHealthSummary::of(step, &all)))
    }
}

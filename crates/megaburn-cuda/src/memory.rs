//! Reports how much memory a GPU holds.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use burn::{backend::DispatchDevice, prelude::Device};
use cubecl::{MemoryScope, MemoryUsage};

use crate::{error::CudaError, queue::CudaQueue};

/// The most bytes that CubeCL's pools in this process held at any report.
static PEAK: AtomicU64 = AtomicU64::new(0);

/// The memory of this process's GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryReport {
    /// Bytes in live tensors.
    pub allocated: u64,
    /// Bytes that CubeCL's pools hold on the GPU: live tensors, and free memory for reuse.
    pub reserved: u64,
    /// The maximum of `reserved` over all reports of this process. The pools return no memory
    /// during a run, so this is what the run needed.
    pub peak: u64,
    /// Bytes that no process holds.
    pub free: u64,
    /// Total bytes of the GPU.
    pub total: u64,
}

impl MemoryReport {
    /// The memory of `device`; `None` if it is not a GPU. Waits until the device thread has made
    /// all submitted launches, but not for the GPU.
    pub fn of(device: &Device) -> Option<Self> {
        let queue = CudaQueue::for_device(device)?;
        let usage = pools(device)?;
        let info = queue.on_device_thread(|| {
            cudarc::driver::result::mem_get_info().map_err(CudaError::driver("cuMemGetInfo"))
        });
        // After a fatal error the driver no longer reports memory.
        let (free, total) = info.unwrap_or((0, 0));
        let allocated = usage.bytes_in_use;
        let reserved = usage.bytes_reserved;
        let peak = note(reserved);
        Some(Self {
            allocated,
            reserved,
            peak,
            free: free as u64,
            total: total as u64,
        })
    }
}

/// Only [`MemoryReport::reserved`], without a call to the driver; `None` if the device is not a
/// GPU.
pub fn reserved(device: &Device) -> Option<u64> {
    let reserved = pools(device)?.bytes_reserved;
    note(reserved);
    Some(reserved)
}

/// Only [`MemoryReport::allocated`]; `None` if the device is not a GPU.
pub fn allocated(device: &Device) -> Option<u64> {
    Some(pools(device)?.bytes_in_use)
}

/// Updates and returns the peak, given the currently reserved bytes.
fn note(reserved: u64) -> u64 {
    PEAK.fetch_max(reserved, Ordering::Relaxed).max(reserved)
}

/// The usage of CubeCL's pools on the GPU; its pinned buffers on the host are not included.
fn pools(device: &Device) -> Option<MemoryUsage> {
    let device = device.clone().inner();
    let DispatchDevice::Cube(gpu) = device.as_dispatch() else {
        return None;
    };
    let streams = gpu
        .client()
        .memory_report(MemoryScope::Device)
        .streams
        .into_iter();
    Some(
        streams
            .map(|stream| stream.pools.usage())
            .fold(MemoryUsage::default(), |all, stream| all.combine(stream)),
    )
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        write!(
            f,
            "{:.2} GiB allocated, {:.2} GiB reserved (peak {:.2} GiB), {:.2} of the GPU's {:.2} \
            GiB free",
            gib(self.allocated),
            gib(self.reserved),
            gib(self.peak),
            gib(self.free),
            gib(self.total),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_a_sentence() {
        let report = MemoryReport {
            allocated: 3 << 29,
            reserved: 2 << 30,
            peak: 2 << 30,
            free: 1 << 30,
            total: 140 << 30,
        };
        let text = "1.50 GiB allocated, 2.00 GiB reserved (peak 2.00 GiB), 1.00 of the GPU's \
                   140.00 GiB free";
        assert_eq!(report.to_string(), text);
    }

    #[test]
    fn the_cpu_has_no_report() {
        assert_eq!(MemoryReport::of(&Device::flex()), None);
    }
}

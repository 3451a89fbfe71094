//! Memory usage of this process.

use burn::prelude::Device;

/// The memory that metrics report: this process's memory on the GPU `device`, or else
/// [`resident_bytes`].
pub fn used_bytes(device: &Device) -> u64 {
    #[cfg(feature = "cuda")]
    if let Some(reserved) = megaburn_cuda::memory::reserved(device) {
        return reserved;
    }
    let _ = device;
    resident_bytes()
}

/// A description of what uses the memory of a GPU; `None` for other devices.
pub(crate) fn report(device: &Device) -> Option<String> {
    #[cfg(feature = "cuda")]
    if let Some(report) = megaburn_cuda::memory::MemoryReport::of(device) {
        return Some(report.to_string());
    }
    let _ = device;
    None
}

/// Resident memory of this process in bytes; 0 if the operating system does not report it.
pub fn resident_bytes() -> u64 {
    memory_stats::memory_stats().map_or(0, |stats| stats.physical_mem as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_touched_is_counted() {
        const SIZE: usize = 64 << 20;
        let before = resident_bytes();
        let block = std::hint::black_box(vec![1u8; SIZE]);
        let grown = resident_bytes().saturating_sub(before);
        assert!(
            grown > SIZE as u64 / 2,
            "{grown} bytes more after touching {}",
            block.len()
        );
    }
}

//! What each kind of GPU should reach.

use serde::Serialize;

/// The peaks of a GPU, from NVIDIA's datasheets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpectedGpu {
    /// Texts that the driver's name of it contains.
    pub name_has: &'static [&'static str],
    /// Peak of products in bf16 without sparsity, FLOP/s.
    pub products_per_second: f64,
    /// Bandwidth of the memory, bytes per second.
    pub memory_bytes_per_second: f64,
    /// Bandwidth of NVLink in one direction, bytes per second; `None` without NVLink to all others.
    pub nvlink_bytes_per_second: Option<f64>,
    /// Its number of NVLinks.
    pub nvlinks: usize,
}

/// Large products reach 0.79 of the peak on an H100 (`benches/results/gemm.md`) and more on an A100,
/// whose power limit is further away.
pub(crate) const LEAST_PRODUCTS: f64 = 0.65;
/// Kernels that only read and write memory reach 0.85 to 0.93 of its bandwidth.
pub(crate) const LEAST_MEMORY: f64 = 0.75;
/// All-reduces of 256 MiB reach 0.7 of NVLink's bandwidth and more (`benches/results/nccl.md`).
pub(crate) const LEAST_NVLINK: f64 = 0.5;

impl ExpectedGpu {
    /// The kinds that are known. The first whose texts are all in a name is meant.
    pub const ALL: [Self; 8] = [
        Self::of(&["H100", "PCIe"], 756e12, 2.0e12, None, 0),
        Self::of(&["H100", "NVL"], 835e12, 3.9e12, None, 0),
        Self::of(&["H100"], 989e12, 3.35e12, Some(450e9), 18),
        Self::of(&["H200", "NVL"], 835e12, 4.8e12, None, 0),
        Self::of(&["H200"], 989e12, 4.8e12, Some(450e9), 18),
        Self::of(&["A100-SXM4-40GB"], 312e12, 1.555e12, Some(300e9), 12),
        Self::of(&["A100-SXM4-80GB"], 312e12, 2.039e12, Some(300e9), 12),
        Self::of(&["B200"], 2250e12, 8.0e12, Some(900e9), 18),
    ];

    const fn of(
        name_has: &'static [&'static str],
        products_per_second: f64,
        memory_bytes_per_second: f64,
        nvlink_bytes_per_second: Option<f64>,
        nvlinks: usize,
    ) -> Self {
        Self {
            name_has,
            products_per_second,
            memory_bytes_per_second,
            nvlink_bytes_per_second,
            nvlinks,
        }
    }

    /// The kind of a GPU with this name.
    pub fn named(name: &str) -> Option<Self> {
        let is_meant = |kind: &Self| kind.name_has.iter().all(|text| name.contains(text));
        // A GB200 is another product, whose figures depend on its server.
        let is_other = name.contains("GB200") || name.contains("GH200") || name.contains("MIG");
        Self::ALL.into_iter().find(is_meant).filter(|_| !is_other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_found_by_the_name_that_the_driver_gives() {
        let products = |name| ExpectedGpu::named(name).map(|gpu| gpu.products_per_second / 1e12);
        assert_eq!(products("NVIDIA H100 80GB HBM3"), Some(989.0));
        assert_eq!(products("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(products("NVIDIA H200"), Some(989.0));
        assert_eq!(products("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(products("NVIDIA GB200"), None);
        assert_eq!(products("NVIDIA GeForce RTX 4090"), None);
    }
}

//! The GPUs that a run can be planned for.

use std::{fmt, str::FromStr};

use serde::Serialize;

use crate::error::PlanError;

/// A GPU and the connections that it has in NVIDIA's own servers of eight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// The name on the command line.
    pub name: &'static str,
    /// The name of the product.
    pub title: &'static str,
    /// Peak of products in bf16 and f16 without sparsity, FLOP/s.
    #[serde(rename = "bf16_flops_per_second")]
    pub bf16: f64,
    /// Peak of products in FP8 without sparsity, FLOP/s; `None` without such units.
    #[serde(rename = "fp8_flops_per_second")]
    pub fp8: Option<f64>,
    /// Peak of products in tf32 without sparsity, FLOP/s.
    #[serde(rename = "tf32_flops_per_second")]
    pub tf32: f64,
    /// Peak of products in f32, FLOP/s.
    #[serde(rename = "f32_flops_per_second")]
    pub f32: f64,
    /// Memory that programs can allocate, bytes.
    pub memory_bytes: u64,
    /// Bandwidth of the memory, bytes per second.
    #[serde(rename = "memory_bytes_per_second")]
    pub memory_bandwidth: f64,
    /// Bandwidth of NVLink in one direction, bytes per second.
    #[serde(rename = "nvlink_bytes_per_second")]
    pub nvlink: f64,
    /// Bandwidth of the network in one direction for each GPU, bytes per second.
    #[serde(rename = "network_bytes_per_second")]
    pub network: f64,
    /// GPUs of a server, which NVLink connects.
    pub gpus_per_node: usize,
    /// Whether steps of this GPU are among `benches/results`. The efficiencies of the others are
    /// those of the H100.
    pub is_measured: bool,
    /// Where the figures are from.
    pub source: &'static str,
}

const GIB: f64 = (1u64 << 30) as f64;

impl Gpu {
    /// Whether it is of the Hopper generation, whose tensor cores take scales of blocks.
    pub(crate) fn is_hopper(&self) -> bool {
        matches!(self.name, "h100" | "h200")
    }

    /// Every GPU that can be planned for.
    ///
    /// Memory is what the driver reports, less than the name says. The network is what the server
    /// has for each GPU: ConnectX-6 at 200 Gbit/s in the DGX A100, ConnectX-7 at 400 Gbit/s in the
    /// others.
    pub const ALL: [Gpu; 4] = [
        Gpu {
            name: "a100",
            title: "NVIDIA A100 SXM4 80 GB",
            bf16: 312e12,
            fp8: None,
            tf32: 156e12,
            f32: 19.5e12,
            memory_bytes: (79.1 * GIB) as u64,
            memory_bandwidth: 2.039e12,
            nvlink: 300e9,
            network: 25e9,
            gpus_per_node: 8,
            is_measured: false,
            source: "NVIDIA A100 Tensor Core GPU datasheet (2021), NVIDIA DGX A100 datasheet",
        },
        Gpu {
            name: "h100",
            title: "NVIDIA H100 SXM5 80 GB",
            bf16: 989e12,
            fp8: Some(1979e12),
            tf32: 494e12,
            f32: 67e12,
            memory_bytes: (79.1 * GIB) as u64,
            memory_bandwidth: 3.35e12,
            nvlink: 450e9,
            network: 50e9,
            gpus_per_node: 8,
            is_measured: true,
            source: "NVIDIA H100 Tensor Core GPU datasheet (2023), NVIDIA DGX H100 datasheet",
        },
        Gpu {
            name: "h200",
            title: "NVIDIA H200 SXM5 141 GB",
            bf16: 989e12,
            fp8: Some(1979e12),
            tf32: 494e12,
            f32: 67e12,
            memory_bytes: (139.8 * GIB) as u64,
            memory_bandwidth: 4.8e12,
            nvlink: 450e9,
            network: 50e9,
            gpus_per_node: 8,
            is_measured: true,
            source: "NVIDIA H200 Tensor Core GPU datasheet (2024), NVIDIA DGX H200 datasheet",
        },
        Gpu {
            name: "b200",
            title: "NVIDIA B200 SXM 180 GB",
            bf16: 2250e12,
            fp8: Some(4500e12),
            tf32: 1125e12,
            f32: 75e12,
            memory_bytes: (178.0 * GIB) as u64,
            memory_bandwidth: 8.0e12,
            nvlink: 900e9,
            network: 50e9,
            gpus_per_node: 8,
            is_measured: false,
            source: "NVIDIA HGX B200 and DGX B200 datasheets (2025)",
        },
    ];

    /// The H100, for which a run is planned if nothing else is asked for.
    pub const H100: Gpu = Self::ALL[1];
    /// The H200.
    pub const H200: Gpu = Self::ALL[2];
}

impl FromStr for Gpu {
    type Err = PlanError;

    fn from_str(name: &str) -> Result<Self, PlanError> {
        let found = Self::ALL.into_iter().find(|gpu| gpu.name == name);
        found.ok_or_else(|| PlanError::UnknownGpu {
            name: name.to_string(),
            known: Self::ALL.map(|gpu| gpu.name).join(", "),
        })
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_found_by_its_name_and_an_unknown_one_is_refused_with_those_there_are() {
        for gpu in Gpu::ALL {
            assert_eq!(gpu.name.parse::<Gpu>().unwrap(), gpu);
        }
        let error = "v100".parse::<Gpu>().unwrap_err().to_string();
        assert_eq!(
            error,
            "`--gpu v100` is not known: choose one of a100, h100, h200, b200"
        );
    }
}

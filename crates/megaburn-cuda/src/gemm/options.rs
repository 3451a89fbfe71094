use std::{
    collections::HashMap,
    sync::{LazyLock, PoisonError, RwLock},
};

use burn::prelude::Device;
use cubecl_common::device::DeviceId;

use crate::queue::{CudaQueue, gpu_id};

/// How matrix products are computed on a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmOptions {
    /// Whether products of f32 matrices may round their inputs to tf32 (ten mantissa bits), which
    /// is eight times as fast. Off by default, as in PyTorch.
    pub tf32: bool,
    /// Whether the algorithm of a product is chosen by timing candidates when its shape first
    /// occurs. This is the default. Otherwise cuBLASLt's first suggestion is used, which is the
    /// same in every run.
    ///
    /// From the third number of rows on that a matrix is multiplied with, a product takes the
    /// algorithm that was fastest for a row count within a factor of 1.5, if there is one.
    pub tune: bool,
    /// How products are tuned that occur for the first time.
    pub tuning: Tuning,
}

impl Default for GemmOptions {
    fn default() -> Self {
        Self {
            tf32: false,
            tune: true,
            tuning: Tuning::default(),
        }
    }
}

/// The settings for tuning products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// The number of cuBLASLt's suggestions that are timed.
    pub suggestions: usize,
    /// A suggestion replaces an earlier one only if it takes less than this fraction of its time.
    ///
    /// The order is cuBLASLt's own estimate, and a timing is of one product on a GPU that has
    /// rested: in a long sequence the GPU is at its power limit, where another algorithm can be the
    /// fastest. With 0.97, 1 and 5 of 40 products were at 0.954 to 0.966 of PyTorch's rate in two
    /// runs; with the first suggestion none was below 0.978 (`benches/results/gemm.md`).
    pub clearly: f32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            suggestions: 8,
            clearly: 0.93,
        }
    }
}

/// The options of each GPU. They belong to the device because Burn has no place for them: neither
/// `Device::cuda(index)` nor an operation such as `Backend::float_matmul` takes options.
static OPTIONS: LazyLock<RwLock<HashMap<DeviceId, GemmOptions>>> = LazyLock::new(RwLock::default);

/// Sets the options of a GPU for the products that are enqueued from now on. Call it when the
/// device is created. It has no effect on other devices.
pub fn set_options(device: &Device, options: GemmOptions) {
    if let Some(gpu) = gpu_id(device) {
        let mut all = OPTIONS.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(gpu, options);
    }
}

/// The options of the GPU of `queue`.
pub(super) fn options(queue: &CudaQueue) -> GemmOptions {
    let all = OPTIONS.read().unwrap_or_else(PoisonError::into_inner);
    all.get(&queue.device_id()).copied().unwrap_or_default()
}

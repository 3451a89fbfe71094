//! How fast a GPU multiplies matrices, without any other rank.

use std::{
    hint::black_box,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use megaburn_kernels::{LinearOptions, linear};

/// The rows and columns of the matrices: three of them need 96 MiB. Smaller products take the GPU as
/// little time as its host takes to enqueue them.
const SIDE: usize = 4096;
/// The products of a measurement: four milliseconds of an H100.
const PRODUCTS: usize = 20;

/// Matrices on a GPU.
#[derive(Debug)]
pub(super) struct GpuProbe {
    device: Device,
    matrices: [Tensor<2>; 2],
    products: usize,
}

impl GpuProbe {
    /// Places the matrices on `device`, and multiplies them once, which compiles kernels. `None` where
    /// there is no room for them, or the device has no bf16: this must not end a run.
    pub(super) fn new(device: &Device) -> Option<Self> {
        let probe = || Self::of_size(device, SIDE, PRODUCTS);
        catch_unwind(AssertUnwindSafe(probe)).unwrap_or(None)
    }

    fn of_size(device: &Device, side: usize, products: usize) -> Option<Self> {
        let uniform = Distribution::Uniform(-1.0, 1.0);
        let random = || Tensor::<2>::random([side, side], uniform, (device, DType::BF16));
        let probe = Self {
            device: device.clone(),
            matrices: [random(), random()],
            products,
        };
        probe.seconds().map(|_| probe)
    }

    /// The seconds of the products. `None` if the GPU failed, which the next step reports.
    pub(super) fn seconds(&self) -> Option<f64> {
        let [a, b] = &self.matrices;
        self.device.sync().ok()?;
        let start = Instant::now();
        for _ in 0..self.products {
            let product = linear(a.clone(), b.clone(), None, LinearOptions::default());
            drop(black_box(product));
        }
        self.device.sync().ok()?;
        Some(start.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_take_time() {
        let seconds = |products| {
            let probe = GpuProbe::of_size(&Device::flex(), 64, products).unwrap();
            probe.seconds().unwrap()
        };
        assert!(seconds(1) > 0.0 && seconds(200) > 2.0 * seconds(1));
    }
}

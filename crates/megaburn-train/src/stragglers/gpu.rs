//! How fast a GPU multiplies matrices, without any other rank.

use std::{hint::black_box, time::Instant};

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use megaburn_kernels::{LinearOptions, linear};

/// The rows and columns of the matrices: three of them need 24 MiB.
const SIDE: usize = 2048;
/// The products of a measurement: a millisecond of an H100.
const PRODUCTS: usize = 40;

/// Matrices on a GPU.
#[derive(Debug)]
pub(super) struct GpuProbe {
    device: Device,
    matrices: [Tensor<2>; 2],
    products: usize,
}

impl GpuProbe {
    /// Places the matrices on `device`, and multiplies them once, which compiles kernels.
    pub(super) fn new(device: &Device) -> Option<Self> {
        Self::of_size(device, SIDE, PRODUCTS)
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

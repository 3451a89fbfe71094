//! Measures how long a GPU takes for an operation, without the host's time.

use std::{thread, time::Duration};

use burn::{
    backend::Cube,
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use megaburn::{
    autograd::backward_from,
    cuda::{self, CudaQueue, timing::elapsed},
};

use crate::Failure;

/// Times operations by the device's own clock. They are enqueued while the device is busy with
/// other work, so that the host's time does not count.
pub(crate) struct DeviceClock {
    queue: CudaQueue,
    rounds: usize,
    /// The operand of the work that keeps the GPU busy.
    large: Tensor<1>,
}

impl DeviceClock {
    /// Creates a clock whose times are means of `rounds` calls.
    pub(crate) fn new(device: &Device, rounds: usize) -> Result<Self, Failure> {
        let probe = Tensor::<1>::zeros([1], device).try_into_primitive::<Cube>();
        let probe = probe.map_err(|_| "the tensor is not on a GPU")?;
        let queue = CudaQueue::of(&cuda::tensor::from_backend(probe)).ok_or(
            "the tensor is not \
            on a CUDA device",
        )?;
        Ok(Self {
            queue,
            rounds,
            large: Tensor::zeros([256 << 20], (device, DType::F32)),
        })
    }

    /// Keeps the GPU busy while the host enqueues the timed work; each of `times` operations takes
    /// half a millisecond.
    fn busy(&self, times: usize) {
        (0..times).for_each(|_| drop(self.large.clone() * 1.5));
    }

    /// Milliseconds of one call on the device: the median of three means.
    pub(crate) fn forward(&self, step: impl Fn()) -> Result<f64, Failure> {
        for _ in 0..3 {
            step();
        }
        let mut means = Vec::new();
        for _ in 0..3 {
            self.queue.on_device_thread(|| Ok(()))?;
            thread::sleep(Duration::from_millis(50));
            self.busy(12);
            let total = elapsed(&self.queue, || (0..self.rounds).for_each(|_| step()))?;
            means.push(f64::from(total) / self.rounds as f64);
        }
        means.sort_by(f64::total_cmp);
        Ok(means[1])
    }

    /// Mean milliseconds of one backward pass on the device, without its forward.
    pub(crate) fn backward<const D: usize, const O: usize>(
        &self,
        step: impl Fn() -> [Tensor<D>; O],
    ) -> Result<f64, Failure> {
        let normal = Distribution::Normal(0.0, 1.0);
        let grads = step().map(|y| y.inner().random_like(normal));
        let mut times = Vec::new();
        for _ in 0..self.rounds + 3 {
            let seeds = step().into_iter().zip(&grads);
            let seeds = seeds.map(|(y, grad)| backward_from(y, Tensor::from_inner(grad.clone())));
            let root = seeds
                .reduce(|a, b| a + b)
                .expect("there is at least one output");
            self.queue.on_device_thread(|| Ok(()))?;
            self.busy(3);
            times.push(elapsed(&self.queue, || drop(root.backward()))?);
        }
        let times = &times[3..];
        Ok(times.iter().map(|time| f64::from(*time)).sum::<f64>() / times.len() as f64)
    }
}

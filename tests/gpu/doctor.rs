//! What `megaburn doctor` measures on a GPU.

use megaburn::{
    collective::Group,
    cuda::{self, libraries::gpu_name},
    doctor::{CudaGpu, ExpectedGpu, GpuUnderTest},
};

use crate::{GroupTest, Test};

pub(crate) const TESTS: &[Test] = &[("rates_are_near_those_of_the_datasheet_and_not_above", rates)];
pub(crate) const GROUP_TESTS: &[GroupTest] = &[(
    "an_all_reduce_takes_longer_than_its_bytes_on_nvlink",
    all_reduce,
)];

/// A rate above a peak means that the clock was stopped before the GPU had computed.
fn within(what: &str, rate: f64, peak: f64, least: f64) -> Result<(), String> {
    let share = rate / peak;
    println!("{what}: {share:.3} of the peak");
    match (least..1.0).contains(&share) {
        true => Ok(()),
        false => Err(format!("{what}: {share:.3} of the peak")),
    }
}

fn rates() -> Result<(), String> {
    cuda::start().map_err(|error| error.to_string())?;
    let name = gpu_name(0).ok_or("the GPU has no name")?;
    let Some(expected) = ExpectedGpu::named(&name) else {
        println!("no peaks of {name} are known");
        return Ok(());
    };
    let gpu = CudaGpu::new(0);
    within(
        "products",
        gpu.products(0.5)?,
        expected.products_per_second,
        0.4,
    )?;
    within(
        "memory",
        gpu.memory(0.5)?,
        expected.memory_bytes_per_second,
        0.4,
    )
}

fn all_reduce(world: &Group) -> Result<(), String> {
    let rank = world.rank();
    let name = gpu_name(rank).ok_or("the GPU has no name")?;
    let nvlink = ExpectedGpu::named(&name).and_then(|gpu| gpu.nvlink_bytes_per_second);
    let Some(nvlink) = nvlink else { return Ok(()) };
    let bytes = 256 << 20;
    let seconds = CudaGpu::new(rank)
        .all_reduce(world, bytes, 10)
        .map_err(|error| error.to_string())?;
    let size = world.size() as f64;
    let bus = 2.0 * (size - 1.0) / size * bytes as f64 / seconds;
    // NCCL needs more rounds than these to reach its rate.
    within("NVLink", bus, nvlink, 0.1)
}

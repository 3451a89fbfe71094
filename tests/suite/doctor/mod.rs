//! `megaburn doctor`: the rules, with GPUs of plain values, and the command.

mod command;
mod gpus;
mod job;

use std::time::Duration;

use megaburn::{
    collective::{CollectiveError, Group, GroupOptions, run_threads},
    doctor::{
        Diagnosis, DoctorConfig, GpuFacts, GpuUnderTest, HostFacts, Limit, LoadSample, Observation,
        Slowdown,
    },
};

/// A GPU that says and reaches what a test gives it.
#[derive(Clone, Debug)]
struct FakeGpu {
    facts: GpuFacts,
    sample: LoadSample,
    products: Result<f64, String>,
    memory: Result<f64, String>,
    bus_bytes_per_second: f64,
}

impl FakeGpu {
    /// A healthy H100.
    fn healthy(index: usize) -> Self {
        let facts = GpuFacts {
            index,
            name: "NVIDIA H100 80GB HBM3".into(),
            pci_address: Some(format!("0000:{index:02X}:00.0")),
            memory_bytes: Some(80 << 30),
            held_bytes: Some(3 << 20),
            max_clock_mhz: Some(1980),
            power_limit_watts: Some(700.0),
            default_power_limit_watts: Some(700.0),
            has_ecc: Some(true),
            uncorrected_errors: Some(0),
            nvlinks: vec![true; 18],
            max_pcie_lanes: Some(16),
            max_pcie_generation: Some(5),
            ..GpuFacts::default()
        };
        let sample = LoadSample {
            clock_mhz: Some(1700),
            temperature_celsius: Some(61),
            power_watts: Some(699.0),
            slowdowns: vec![Slowdown::PowerLimit],
            pcie_lanes: Some(16),
            pcie_generation: Some(5),
        };
        Self {
            facts,
            sample,
            products: Ok(780e12),
            memory: Ok(2.9e12),
            bus_bytes_per_second: 330e9,
        }
    }
}

impl GpuUnderTest for FakeGpu {
    fn at_rest(&self) -> GpuFacts {
        self.facts.clone()
    }

    fn sample(&self) -> Option<LoadSample> {
        Some(self.sample.clone())
    }

    fn products(&self, _: f64) -> Result<f64, String> {
        // Long enough for a few samples.
        std::thread::sleep(Duration::from_millis(250));
        self.products.clone()
    }

    fn memory(&self, _: f64) -> Result<f64, String> {
        self.memory.clone()
    }

    fn all_reduce(&self, group: &Group, bytes: u64, _: usize) -> Result<f64, CollectiveError> {
        group.barrier()?;
        let size = group.size() as f64;
        let moved = bytes as f64 * 2.0 * (size - 1.0) / size;
        Ok(moved / self.bus_bytes_per_second)
    }
}

/// A host with room for some ranks.
fn roomy() -> HostFacts {
    HostFacts {
        cores: 16,
        memory_bytes: Some(64 << 30),
        available_bytes: Some(60 << 30),
        open_files: Some(Limit::Of(1024)),
        locked_bytes: Some(Limit::Unlimited),
        shm_bytes: Some(32 << 30),
        shm_free_bytes: Some(32 << 30),
        ..HostFacts::default()
    }
}

/// Examines ranks that are threads; `of_rank` gives each its configuration and its GPU.
fn examine(
    ranks: usize,
    of_rank: impl Fn(usize) -> (DoctorConfig, Option<FakeGpu>) + Sync,
) -> Diagnosis {
    let examined = run_threads(ranks, GroupOptions::default(), |world| {
        let (config, gpu) = of_rank(world.rank());
        let gpu = gpu.as_ref().map(|gpu| gpu as &dyn GpuUnderTest);
        let config = config.with_quick(true).with_machine(roomy());
        config.examine(&world, gpu)
    });
    let mut examined: Vec<_> = examined.into_iter().map(Result::unwrap).collect();
    let diagnosis = examined[0].diagnosis.take().unwrap();
    for rank in &examined {
        assert_eq!(rank.is_well, diagnosis.is_well, "all ranks agree");
    }
    assert!(examined[1..].iter().all(|rank| rank.diagnosis.is_none()));
    diagnosis
}

/// The one finding of a check, and no finding of another check.
fn only<'a>(diagnosis: &'a Diagnosis, check: &str) -> &'a Observation {
    let found: Vec<_> = diagnosis.findings().collect();
    let [one] = found[..] else {
        panic!("not one finding:\n{diagnosis}")
    };
    assert_eq!(one.check, check, "{diagnosis}");
    assert!(one.fix.as_ref().is_some_and(|fix| fix.len() > 5));
    assert!(!diagnosis.is_well);
    one
}

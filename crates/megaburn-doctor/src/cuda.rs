//! GPUs as they are: readings through NVML, and measured work.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::{Duration, Instant},
};

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use megaburn_collective::{CollectiveError, Group, Lane, ReduceOp, tensors};
use megaburn_cuda::{libraries, versions::versions};
use megaburn_kernels::{LinearOptions, linear};
use nvml_wrapper::{
    Nvml,
    enum_wrappers::{
        device::{Clock, EccCounter, MemoryError, TemperatureSensor, TopologyLevel},
        nv_link::ErrorCounter,
    },
};

use crate::{
    facts::{GpuFacts, LibraryFacts},
    gpu::{GpuUnderTest, LoadSample},
    nvml::slowdowns,
};

/// The rows and columns of the matrices that are multiplied.
const SIDE: usize = 8192;
/// Products, or passes over the memory, between two looks at the clock.
const AT_ONCE: usize = 10;
/// The elements, in f32, that are read and written: 1 GiB.
const ELEMENTS: usize = 256 << 20;
/// The most NVLinks of a GPU that exists.
const MOST_LINKS: u32 = 18;

/// The versions of NVIDIA's libraries, for [`RankFacts`](crate::RankFacts).
pub fn library_facts() -> Vec<LibraryFacts> {
    let fact = |library: megaburn_cuda::versions::LibraryVersion| {
        let (version, file, error) = match library.found {
            Ok((version, file)) => (Some(version), file, None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        LibraryFacts {
            name: library.name.into(),
            version,
            file: file.map(|file| file.display().to_string()),
            error,
            lacks: library.lacks,
            others: library.others,
        }
    };
    versions().into_iter().map(fact).collect()
}

/// A GPU of this process.
pub struct CudaGpu {
    index: usize,
    address: Option<String>,
    device: Device,
    nvml: Result<Nvml, String>,
}

impl fmt::Debug for CudaGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGpu({} at {:?})", self.index, self.address)
    }
}

impl CudaGpu {
    /// The GPU with this number among those that the process may use. Nothing is computed yet; call
    /// [`megaburn_cuda::start`] first.
    pub fn new(index: usize) -> Self {
        Self {
            index,
            address: libraries::gpu_pci_address(index),
            device: Device::cuda(index),
            nvml: Nvml::init().map_err(|error| error.to_string()),
        }
    }

    /// The GPU in NVML, which numbers GPUs in another way than this process.
    fn in_nvml(&self) -> Option<nvml_wrapper::Device<'_>> {
        let address = self.address.as_deref()?;
        self.nvml.as_ref().ok()?.device_by_pci_bus_id(address).ok()
    }

    /// How it is connected to the other GPUs of the host.
    fn connections(&self, own: &nvml_wrapper::Device<'_>) -> BTreeMap<String, String> {
        let Ok(nvml) = &self.nvml else {
            return BTreeMap::new();
        };
        let mut linked: BTreeMap<String, usize> = BTreeMap::new();
        for link in 0..MOST_LINKS {
            let link = own.link_wrapper_for(link);
            if link.is_active().unwrap_or(false)
                && let Ok(remote) = link.remote_pci_info()
            {
                *linked.entry(remote.bus_id.to_lowercase()).or_default() += 1;
            }
        }
        let address = |gpu: &nvml_wrapper::Device<'_>| gpu.pci_info().map(|info| info.bus_id);
        let gpus = (0..nvml.device_count().unwrap_or(0))
            .filter_map(|index| nvml.device_by_index(index).ok())
            .filter_map(|gpu| Some((address(&gpu).ok()?.to_lowercase(), gpu)));
        let gpus: Vec<_> = gpus.collect();
        let is_gpu = |address: &String| gpus.iter().any(|(gpu, _)| gpu == address);
        // Links that lead to no GPU lead to a switch, and so to all GPUs.
        let to_switch = linked.iter().filter(|(remote, _)| !is_gpu(remote));
        let to_switch: usize = to_switch.map(|(_, links)| links).sum();
        let own_address = address(own).map(|address| address.to_lowercase());
        let mut found = BTreeMap::new();
        for (address, other) in gpus {
            if own_address.as_ref().is_ok_and(|own| *own == address) {
                continue;
            }
            let way = match (linked.get(&address), to_switch) {
                (Some(links), _) => format!("{links} NVLinks"),
                (None, links @ 1..) => format!("{links} NVLinks to switches"),
                (None, 0) => match own.topology_common_ancestor(other) {
                    Ok(TopologyLevel::Internal) => "same board".to_string(),
                    Ok(TopologyLevel::Single) => "one PCIe switch".to_string(),
                    Ok(TopologyLevel::Multiple) => "several PCIe switches".to_string(),
                    Ok(TopologyLevel::HostBridge) => "PCIe host bridge".to_string(),
                    Ok(TopologyLevel::Node) => "one NUMA node".to_string(),
                    Ok(_) => "other NUMA node".to_string(),
                    Err(_) => "unknown".to_string(),
                },
            };
            found.insert(address, way);
        }
        found
    }

    fn timed_all_reduce(
        &self,
        group: &Group,
        bytes: u64,
        rounds: usize,
    ) -> Result<f64, CollectiveError> {
        let elements = bytes as usize / 2;
        let x = Tensor::<1>::zeros([elements], (&self.device, DType::BF16));
        let reduce = || -> Result<Tensor<1>, CollectiveError> {
            let work = tensors::all_reduce(x.clone(), ReduceOp::Sum, group, Lane::InOrder)?;
            Ok(work.wait())
        };
        // A failure of the GPU is a panic to the caller, which asks the group for its failure first.
        let wait = || wait_for(&self.device).unwrap_or_else(|why| resume_unwind(Box::new(why)));
        for _ in 0..3 {
            drop(reduce()?);
        }
        wait();
        let start = Instant::now();
        for _ in 0..rounds {
            drop(reduce()?);
        }
        wait();
        Ok(start.elapsed().as_secs_f64() / rounds as f64)
    }
}

impl GpuUnderTest for CudaGpu {
    fn at_rest(&self) -> GpuFacts {
        let mut facts = GpuFacts {
            index: self.index,
            name: libraries::gpu_name(self.index).unwrap_or_else(|| "GPU".into()),
            pci_address: self.address.clone(),
            memory_bytes: libraries::gpu_memory(self.index),
            ..GpuFacts::default()
        };
        let Some(gpu) = self.in_nvml() else {
            return facts;
        };
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
        let own = std::process::id();
        if let Ok(memory) = gpu.memory_info() {
            facts.memory_bytes = Some(memory.total);
            // What the driver reserves for itself is held by no process.
            facts.held_bytes = Some(
                memory
                    .total
                    .saturating_sub(memory.free)
                    .saturating_sub(memory.reserved),
            );
        }
        let holders = gpu.running_compute_processes().unwrap_or_default();
        facts.holders = holders.into_iter().map(|process| process.pid).collect();
        facts.holders.retain(|pid| *pid != own);
        facts.max_clock_mhz = gpu.max_clock_info(Clock::SM).ok();
        facts.power_limit_watts = gpu.enforced_power_limit().ok().map(watts);
        facts.default_power_limit_watts = gpu.power_management_limit_default().ok().map(watts);
        facts.has_ecc = gpu.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled);
        let errors = |kind| gpu.total_ecc_errors(kind, EccCounter::Volatile).ok();
        facts.uncorrected_errors = errors(MemoryError::Uncorrected);
        facts.corrected_errors = errors(MemoryError::Corrected);
        for link in 0..MOST_LINKS {
            let link = gpu.link_wrapper_for(link);
            // A link that the card does not have is an error.
            let Ok(is_active) = link.is_active() else {
                continue;
            };
            facts.nvlinks.push(is_active);
            let recoveries = link.error_counter(ErrorCounter::DlRecovery).unwrap_or(0);
            // All ones mean that the counter does not exist.
            if recoveries != u64::MAX {
                facts.nvlink_recoveries += recoveries;
            }
        }
        facts.max_pcie_lanes = gpu.max_pcie_link_width().ok();
        facts.max_pcie_generation = gpu.max_pcie_link_gen().ok();
        facts.connections = self.connections(&gpu);
        facts
    }

    fn sample(&self) -> Option<LoadSample> {
        let gpu = self.in_nvml()?;
        Some(LoadSample {
            clock_mhz: gpu.clock_info(Clock::SM).ok(),
            temperature_celsius: gpu.temperature(TemperatureSensor::Gpu).ok(),
            power_watts: gpu.power_usage().ok().map(|power| f64::from(power) / 1e3),
            slowdowns: slowdowns(&gpu),
            pcie_lanes: gpu.current_pcie_link_width().ok(),
            pcie_generation: gpu.current_pcie_link_gen().ok(),
        })
    }

    fn products(&self, seconds: f64) -> Result<f64, String> {
        guarded(|| {
            let random = || {
                let uniform = Distribution::Uniform(-1.0, 1.0);
                Tensor::<2>::random([SIDE, SIDE], uniform, (&self.device, DType::BF16))
            };
            let (a, b) = (random(), random());
            let multiply = || linear(a.clone(), b.clone(), None, LinearOptions::default());
            let rounds = rounds_per_second(&self.device, seconds, multiply)?;
            Ok(rounds * 2.0 * (SIDE as f64).powi(3))
        })
    }

    fn memory(&self, seconds: f64) -> Result<f64, String> {
        guarded(|| {
            let x = Tensor::<1>::zeros([ELEMENTS], (&self.device, DType::F32));
            // `x` lives on, so the result is written to other memory.
            let rounds = rounds_per_second(&self.device, seconds, || x.clone().add_scalar(1.0))?;
            Ok(rounds * 2.0 * (ELEMENTS * 4) as f64)
        })
    }

    fn all_reduce(&self, group: &Group, bytes: u64, rounds: usize) -> Result<f64, CollectiveError> {
        let work = || self.timed_all_reduce(group, bytes, rounds);
        let timed = catch_unwind(AssertUnwindSafe(work));
        // Readers of what a failed collective should have written panic.
        match (group.failure(), timed) {
            (Some(failure), _) => Err(failure),
            (None, Ok(timed)) => timed,
            (None, Err(panic)) => resume_unwind(panic),
        }
    }

    fn unread(&self) -> Option<String> {
        match &self.nvml {
            Err(error) => Some(format!(
                "clocks, temperatures, power, memory errors, NVLink and PCIe: NVML (libnvidia-ml.so \
                 of the driver) cannot be used: {error}"
            )),
            Ok(_) if self.in_nvml().is_none() => Some(format!(
                "clocks, temperatures, power, memory errors, NVLink and PCIe: NVML does not know \
                 the GPU at {}",
                self.address.as_deref().unwrap_or("an unknown address")
            )),
            Ok(_) => None,
        }
    }
}

/// How often `work` runs in a second, from about `seconds` of it after a warm-up.
fn rounds_per_second<const D: usize>(
    device: &Device,
    seconds: f64,
    work: impl Fn() -> Tensor<D>,
) -> Result<f64, String> {
    for _ in 0..3 {
        drop(work());
    }
    wait_for(device)?;
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < Duration::from_secs_f64(seconds) {
        for _ in 0..AT_ONCE {
            drop(work());
        }
        wait_for(device)?;
        rounds += AT_ONCE;
    }
    Ok(rounds as f64 / start.elapsed().as_secs_f64())
}

/// Waits until the GPU has computed everything. Reading an element is not enough: its bytes are
/// waited for only when they are looked at.
fn wait_for(device: &Device) -> Result<(), String> {
    device.sync().map_err(|error| error.to_string())
}

/// Runs work whose failures on the GPU are panics.
fn guarded(work: impl FnOnce() -> Result<f64, String>) -> Result<f64, String> {
    let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(text.unwrap_or("it gave no reason").to_string())
    });
    done.map_err(|why| format!("the GPU failed: {why}"))
}

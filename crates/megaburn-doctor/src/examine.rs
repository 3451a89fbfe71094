//! The examination of all ranks.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use megaburn_collective::{CollectiveError, Group, GroupOptions, host_name, objects, run_threads};

use crate::{
    bandwidth,
    diagnosis::Diagnosis,
    facts::{Bandwidth, GpuFacts, HostFacts, LibraryFacts, RankFacts},
    folder,
    gpu::{GpuUnderTest, under_load},
    host,
    judge::judge,
    skew,
};

/// The variable that gives the host another name, as in runs.
const HOST: &str = "MEGABURN_HOST";
/// The most ranks that are threads of a process, when their bandwidth is measured.
const MOST_THREADS: usize = 4;

/// What is examined, and how thoroughly.
#[derive(Clone, Debug, Default)]
pub struct DoctorConfig {
    /// The folder that all ranks must share.
    pub folder: Option<PathBuf>,
    /// Whether to measure for less time.
    pub is_quick: bool,
    /// The versions of NVIDIA's libraries.
    pub libraries: Vec<LibraryFacts>,
    /// What this process cannot examine, and why.
    pub unchecked: Vec<String>,
    /// What this host offers; by default it is read.
    pub machine: Option<HostFacts>,
    /// The name of this host; by default that of the system.
    pub host: Option<String>,
    /// The version of this program.
    pub program: String,
    /// How the ranks met, for people.
    pub rendezvous: Option<String>,
    /// How far this host's clock is ahead, in nanoseconds, in addition to what the system says.
    clock_shift: i64,
}

/// What a rank gets from an examination.
#[derive(Clone, Debug, PartialEq)]
pub struct Examination {
    /// Whether there is no finding on any rank. All ranks get the same.
    pub is_well: bool,
    /// The diagnosis, on rank 0.
    pub diagnosis: Option<Diagnosis>,
}

impl DoctorConfig {
    /// Examines everything but a folder.
    pub fn new() -> Self {
        Self {
            program: env!("CARGO_PKG_VERSION").into(),
            ..Self::default()
        }
    }

    /// Also examines the folder that the ranks share.
    pub fn with_folder(self, folder: impl AsRef<Path>) -> Self {
        Self {
            folder: Some(folder.as_ref().into()),
            ..self
        }
    }

    /// Sets whether to measure for less time.
    pub fn with_quick(self, is_quick: bool) -> Self {
        Self { is_quick, ..self }
    }

    /// Sets the versions of NVIDIA's libraries.
    pub fn with_libraries(self, libraries: Vec<LibraryFacts>) -> Self {
        Self { libraries, ..self }
    }

    /// Adds something that this process cannot examine, and why.
    pub fn with_unchecked(mut self, what: impl Into<String>) -> Self {
        self.unchecked.push(what.into());
        self
    }

    /// Sets how the ranks met.
    pub fn with_rendezvous(self, rendezvous: Option<String>) -> Self {
        Self { rendezvous, ..self }
    }

    /// Sets the name of this host.
    pub fn with_host(self, host: impl Into<String>) -> Self {
        Self {
            host: Some(host.into()),
            ..self
        }
    }

    /// Sets what this host offers, for tests.
    pub fn with_machine(self, machine: HostFacts) -> Self {
        Self {
            machine: Some(machine),
            ..self
        }
    }

    /// Sets the version of this program, for tests.
    pub fn with_program(self, program: impl Into<String>) -> Self {
        Self {
            program: program.into(),
            ..self
        }
    }

    /// Shifts this host's clock, for tests.
    pub fn with_clock_shift(self, clock_shift: i64) -> Self {
        Self {
            clock_shift,
            ..self
        }
    }

    /// Examines all ranks. `gpu` is that of this rank.
    ///
    /// # Errors
    /// See [`CollectiveError`]. Whatever else is wrong is a finding.
    /// # Collective
    /// All ranks, with the same folder. If only some of them have a GPU, bandwidths are those of the
    /// hosts.
    pub fn examine(
        &self,
        world: &Group,
        gpu: Option<&dyn GpuUnderTest>,
    ) -> Result<Examination, CollectiveError> {
        let mut mine = RankFacts {
            rank: world.rank(),
            host: self.host_name(),
            program: self.program.clone(),
            libraries: self.libraries.clone(),
            unchecked: self.unchecked.clone(),
            rendezvous: self.rendezvous.clone(),
            ..RankFacts::default()
        };
        let hosts = objects::gather(world, &mine.host)?;
        let hosts = objects::broadcast(world, &hosts)?;
        let on_this = hosts.iter().filter(|host| **host == mine.host).count();
        mine.machine = match &self.machine {
            Some(machine) => HostFacts {
                ranks: on_this,
                ..machine.clone()
            },
            None => host::read(on_this),
        };
        if mine.machine.xids.is_none() && gpu.is_some() {
            let what = "Xid errors: /dev/kmsg cannot be read without privileges; see `dmesg`";
            mine.unchecked.push(what.into());
        }
        if let Some(folder) = &self.folder {
            mine.folder = Some(folder::examine(world, folder)?);
        }
        let first_of = |host: &String| hosts.iter().position(|other| other == host);
        let askers: BTreeSet<usize> = hosts.iter().filter_map(first_of).collect();
        let askers: Vec<usize> = askers.into_iter().collect();
        let clock = || skew::system_clock() + self.clock_shift;
        mine.clock_ahead_seconds = skew::ahead_of_rank_0(world, &askers, clock)?;
        let facts = gpu.map(GpuUnderTest::at_rest);
        // All GPUs of a host work at the same time, as in a run: it is hot, and power is short.
        world.barrier()?;
        if let (Some(gpu), Some(facts)) = (gpu, facts) {
            mine.gpu = Some(self.measured(facts, gpu, &mut mine.unchecked));
            mine.unchecked.extend(gpu.unread());
        }
        let have_gpus = objects::gather(world, &gpu.is_some())?;
        let all_have = have_gpus.into_iter().all(|has_gpu| has_gpu);
        let all_have = objects::broadcast(world, &all_have)?;
        let gpus = gpu.filter(|_| all_have);
        mine.bandwidths = bandwidth::measure(world, &hosts, gpus, self.is_quick)?;
        if world.size() == 1 && gpu.is_none() {
            mine.bandwidths = self.between_threads(mine.machine.cores)?;
        }
        let all = objects::gather(world, &mine)?;
        let diagnosis = (world.rank() == 0).then(|| judge(all));
        let is_well = diagnosis.as_ref().is_none_or(|found| found.is_well);
        Ok(Examination {
            is_well: objects::broadcast(world, &is_well)?,
            diagnosis,
        })
    }

    fn host_name(&self) -> String {
        let named = std::env::var(HOST).ok().filter(|name| !name.is_empty());
        self.host.clone().or(named).unwrap_or_else(host_name)
    }

    /// The rates of a GPU, and its state while they are measured.
    fn measured(
        &self,
        mut facts: GpuFacts,
        gpu: &dyn GpuUnderTest,
        unchecked: &mut Vec<String>,
    ) -> GpuFacts {
        let seconds = if self.is_quick { 0.3 } else { 1.0 };
        let (products, load) = under_load(gpu, || gpu.products(seconds));
        facts.load = load;
        let mut note = |what: &str, found: Result<f64, String>| match found {
            Ok(rate) => Some(rate),
            Err(why) => {
                unchecked.push(format!("{what} of GPU {}: {why}", facts.index));
                None
            }
        };
        facts.products_per_second = note("products", products);
        facts.memory_bytes_per_second = note("memory bandwidth", gpu.memory(seconds));
        facts
    }

    /// The bandwidth between ranks that are threads of this process.
    fn between_threads(&self, cores: usize) -> Result<Vec<Bandwidth>, CollectiveError> {
        let ranks = cores.clamp(2, MOST_THREADS);
        let bytes: u64 = if self.is_quick { 4 << 20 } else { 16 << 20 };
        let found = run_threads(ranks, GroupOptions::default(), |world| {
            bandwidth::on_host(&world, bytes, 3)
        });
        let seconds = found.into_iter().filter_map(Result::ok);
        let Some(seconds) = seconds.reduce(f64::max) else {
            return Ok(Vec::new());
        };
        let size = ranks as f64;
        Ok(vec![Bandwidth {
            group: format!("{ranks} threads"),
            members: vec![0],
            bytes,
            bytes_per_second: bytes as f64 / seconds * 2.0 * (size - 1.0) / size,
            is_nccl: false,
        }])
    }
}

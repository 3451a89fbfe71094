//! What each rank reports to rank 0.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

/// What one rank found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankFacts {
    /// The rank in the world.
    pub rank: usize,
    /// The name of its host.
    pub host: String,
    /// The version of the program.
    pub program: String,
    /// How the ranks met, for people.
    pub rendezvous: Option<String>,
    /// Its host, as the rank sees it.
    pub machine: HostFacts,
    /// NVIDIA's libraries; empty without GPUs.
    pub libraries: Vec<LibraryFacts>,
    /// Its GPU.
    pub gpu: Option<GpuFacts>,
    /// The shared folder, if one is examined.
    pub folder: Option<FolderFacts>,
    /// How far its host's clock is ahead of that of rank 0. Only the first rank of each host
    /// measures it.
    pub clock_ahead_seconds: Option<f64>,
    /// The groups that it measured.
    pub bandwidths: Vec<Bandwidth>,
    /// What it could not look at, and why.
    pub unchecked: Vec<String>,
}

impl RankFacts {
    /// The rank with its host and its GPU, for messages.
    pub fn place(&self) -> String {
        match &self.gpu {
            Some(gpu) => format!("rank {} (host {}, GPU {})", self.rank, self.host, gpu.index),
            None => format!("rank {} (host {})", self.rank, self.host),
        }
    }
}

/// A limit of the operating system on a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// There is none.
    Unlimited,
    /// This number, or this number of bytes.
    Of(u64),
}

/// A host, as a process sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The number of cores that the process may use.
    pub cores: usize,
    /// `RAYON_NUM_THREADS`.
    pub rayon_threads: Option<String>,
    /// The number of ranks on this host.
    pub ranks: usize,
    /// The memory of the host.
    pub memory_bytes: Option<u64>,
    /// The memory that processes can still get, from the host and from the limit of the container.
    pub available_bytes: Option<u64>,
    /// The number of files that the process may open.
    pub open_files: Option<Limit>,
    /// The bytes that the process may lock in memory, as network cards require.
    pub locked_bytes: Option<Limit>,
    /// The size of `/dev/shm`, through which the ranks of a host exchange data.
    pub shm_bytes: Option<u64>,
    /// The bytes of it that are free.
    pub shm_free_bytes: Option<u64>,
    /// The variables that change how GPUs, NCCL and threads work.
    pub environment: BTreeMap<String, String>,
    /// The numbers of the Xid errors in the kernel's log, by PCI address. `None`: it cannot be read.
    pub xids: Option<BTreeMap<String, BTreeSet<u32>>>,
}

/// A library that GPUs need.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LibraryFacts {
    /// Its name.
    pub name: String,
    /// Its version, such as `2.27.3`.
    pub version: Option<String>,
    /// The file that the process has loaded.
    pub file: Option<String>,
    /// Why it cannot be used, and what to install.
    pub error: Option<String>,
    /// What this version cannot do.
    pub lacks: Option<String>,
    /// Other copies on the machine, which are not used.
    pub others: Vec<String>,
}

/// A GPU: its readings before the examination, and what it reached in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// Its number in this process.
    pub index: usize,
    /// The name that the driver gives it.
    pub name: String,
    /// Its PCI address.
    pub pci_address: Option<String>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// The part of it that other processes hold.
    pub held_bytes: Option<u64>,
    /// The ids of those processes, as far as they are visible.
    pub holders: Vec<u32>,
    /// Its highest clock, in MHz.
    pub max_clock_mhz: Option<u32>,
    /// The power that it may draw now, and by default.
    pub power_limit_watts: Option<f64>,
    /// The power that it may draw by default.
    pub default_power_limit_watts: Option<f64>,
    /// Whether its memory detects and corrects errors.
    pub has_ecc: Option<bool>,
    /// Errors of its memory that could not be corrected, since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    /// Corrected errors, since the driver was loaded.
    pub corrected_errors: Option<u64>,
    /// Whether each of its NVLinks is active.
    pub nvlinks: Vec<bool>,
    /// How often a link had to be recovered.
    pub nvlink_recoveries: u64,
    /// The widest PCIe connection that the card and its slot can have.
    pub max_pcie_lanes: Option<u32>,
    /// The newest generation of PCIe that the card and its slot have.
    pub max_pcie_generation: Option<u32>,
    /// How it is connected to the other GPUs of the host, by their PCI address.
    pub connections: BTreeMap<String, String>,
    /// Its state while it multiplied matrices.
    pub load: Option<LoadFacts>,
    /// The rate of large products in bf16, FLOP/s.
    pub products_per_second: Option<f64>,
    /// The bandwidth of its memory.
    pub memory_bytes_per_second: Option<f64>,
}

/// Why a GPU does not clock higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Slowdown {
    /// It draws the power that it may draw. Usual for large products.
    PowerLimit,
    /// Someone set a lower clock for applications.
    ApplicationClocks,
    /// It, or its memory, is too hot.
    Thermal,
    /// The power supply asks for less.
    PowerBrake,
    /// The card slows itself down, for its temperature or its power.
    Hardware,
    /// Another GPU of its group is slow.
    SyncBoost,
}

impl fmt::Display for Slowdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PowerLimit => "power limit",
            Self::ApplicationClocks => "clock set for applications",
            Self::Thermal => "temperature",
            Self::PowerBrake => "power brake of the server",
            Self::Hardware => "slowdown by the card",
            Self::SyncBoost => "sync boost with a slower GPU",
        })
    }
}

/// A GPU while it computes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadFacts {
    /// The median of its clock, in MHz.
    pub clock_mhz: Option<u32>,
    /// The highest temperature.
    pub temperature_celsius: Option<u32>,
    /// The highest power.
    pub power_watts: Option<f64>,
    /// Why its clock was not higher.
    pub slowdowns: BTreeSet<Slowdown>,
    /// The lanes of its PCIe connection.
    pub pcie_lanes: Option<u32>,
    /// The generation of its PCIe connection.
    pub pcie_generation: Option<u32>,
}

/// What a rank found in the shared folder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FolderFacts {
    /// The folder that was examined: the one that was asked for, or the nearest above it that
    /// exists.
    pub path: String,
    /// What failed.
    pub error: Option<String>,
    /// The ranks whose files this rank did not see.
    pub unseen: Vec<usize>,
    /// The time of writing, syncing and renaming a file of 1 MiB.
    pub write_seconds: Option<f64>,
    /// The bytes that can still be written.
    pub free_bytes: Option<u64>,
}

/// The bandwidth of an all-reduce over a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// The group, in words.
    pub group: String,
    /// Its ranks.
    pub members: Vec<usize>,
    /// The bytes of each rank's tensor.
    pub bytes: u64,
    /// The bus bandwidth, as nccl-tests defines it.
    pub bytes_per_second: f64,
    /// Whether the data went through NCCL.
    pub is_nccl: bool,
}

//! Examines the hosts and GPUs of a job before it trains.
//!
//! Every rank collects [`RankFacts`]: about its host ([`HostFacts`]), its libraries
//! ([`LibraryFacts`]), its GPU ([`GpuFacts`]), the shared folder ([`FolderFacts`]) and the groups
//! that it communicates in ([`Bandwidth`]). Rank 0 compares those of all ranks, and makes a
//! [`Diagnosis`] of them: one [`Observation`] per line, with a fix where something is wrong.
//!
//! ```no_run
//! use megaburn_collective::{CollectiveError, Group};
//! use megaburn_doctor::DoctorConfig;
//!
//! fn examine(world: &Group) -> Result<bool, CollectiveError> {
//!     let examined = DoctorConfig::new().with_folder("runs").examine(world, None)?;
//!     if let Some(diagnosis) = &examined.diagnosis {
//!         println!("{diagnosis}");
//!     }
//!     Ok(examined.is_well)
//! }
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// These macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod bandwidth;
#[cfg(feature = "cuda")]
mod cuda;
mod diagnosis;
mod examine;
mod expected;
mod facts;
mod folder;
mod gpu;
mod health;
mod host;
mod judge;
mod kernel_log;
#[cfg(feature = "cuda")]
mod nvml;
mod skew;

#[cfg(feature = "cuda")]
pub use cuda::{CudaGpu, library_facts};
pub use diagnosis::{Diagnosis, Kind, Observation};
pub use examine::{DoctorConfig, Examination};
pub use expected::ExpectedGpu;
pub use facts::{
    Bandwidth, FolderFacts, GpuFacts, HostFacts, LibraryFacts, Limit, LoadFacts, RankFacts,
    Slowdown,
};
pub use gpu::{GpuUnderTest, LoadSample};
pub use health::{GpuHealth, HealthEvent, HealthWatch};
pub use judge::judge;
#[cfg(feature = "cuda")]
pub use nvml::watch_health;

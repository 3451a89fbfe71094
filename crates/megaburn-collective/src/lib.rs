//! Groups of ranks and their collectives.
//!
//! A [`Group`] is a handle that a rank holds. It knows its members, this rank's number among them,
//! the run's seed, and the transport that connects them: threads of one process ([`run_threads`])
//! or TCP between processes ([`connect`]). There are no globals; code that communicates is given
//! its group.
//!
//! - **Deterministic**: reductions run in rank order, so the result is bit-identical on every rank,
//!   over every transport and in every run.
//! - **Nothing hangs**: ranks that disagree and dead, panicked or silent peers become a
//!   [`CollectiveError`] on every other rank within the timeout. Afterwards every group of the rank
//!   is unusable. A rank in long work declares it ([`Group::phase`]), and the others wait for it as
//!   long as it makes progress.
//!
//! [`region`] holds the differentiable operations that parallel layers are built from, [`tensors`]
//! the same operations without gradients. On CUDA devices (feature `cuda`) both go through NCCL.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// Burn has deprecated NdArray, and still has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]
// The macros panic if their output cannot be written (closed pipe), so they are denied.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod activity;
mod along_tree;
mod busy;
mod call;
mod clock;
mod collectives;
mod deadline;
#[cfg(any(feature = "cuda", test))]
mod device;
mod error;
mod exchange;
mod fault;
mod group;
mod hang;
mod host_name;
mod joined;
mod lane;
mod launch;
mod mailbox;
mod message;
pub mod objects;
mod options;
mod phase;
mod process_groups;
mod rank_context;
mod recorder;
mod reduce;
pub mod region;
mod rehearsal;
mod section;
mod section_guard;
mod shards;
mod sync;
mod tcp;
pub mod tensors;
mod threads;
mod traced;
mod transport;
mod tree;

pub use activity::Quiet;
pub use busy::Phase;
pub use call::{Call, Collective, ReduceOp};
pub use error::CollectiveError;
pub use group::Group;
pub use hang::{CallState, FirstFailure, HeardCall, RankReport, ReportedCall};
pub use host_name::host_name;
pub use lane::Lane;
pub use launch::{RankFailure, run_threads};
pub use options::{GroupOptions, PhaseLimits};
pub use phase::{PhaseGuard, Progress, Pulse};
pub use process_groups::ProcessGroups;
pub use recorder::{FlightRecord, FlightState};
pub use section::SectionTime;
pub use section_guard::SectionGuard;
pub use shards::{GroupShards, ParamShards, ShardsError, shard_of};
pub use tcp::{ConnectOptions, JobToken, RankEnv, connect, free_port, report_start_failure};
pub use traced::TracedCall;

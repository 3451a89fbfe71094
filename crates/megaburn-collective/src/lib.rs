//! Groups of ranks and their collectives.
//!
//! A [`Group`] is a handle that a rank holds: who its members are, which of them this rank is, the
//! run's seed, and the link over which they talk: threads of one process ([`run_threads`]) or TCP
//! between processes ([`connect`]). There are no globals; whatever communicates is given its group.
//!
//! - **Deterministic**: reductions run in rank order, so the result is bit-identical on every rank,
//!   over every transport and in every run.
//! - **Nothing hangs**: ranks that disagree, a dead, panicked or silent peer become a
//!   [`CollectiveError`] on every other rank within the timeout. Afterwards every group of the rank
//!   is unusable. A rank that works on something long says so ([`Group::phase`]): the others wait
//!   for it as long as it makes progress.
//!
//! [`region`] holds the differentiable operations on tensors that parallel layers are made of,
//! [`tensors`] the same without gradients. On CUDA devices (feature `cuda`) both go through NCCL.

// These macros panic where their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod activity;
mod busy;
mod clock;
mod collectives;
mod deadline;
#[cfg(any(feature = "cuda", test))]
mod device;
mod error;
mod exchange;
mod fault;
mod group;
mod host_name;
mod joined;
mod launch;
mod mailbox;
mod message;
pub mod objects;
mod phase;
mod process_groups;
mod recorder;
mod reduce;
pub mod region;
mod sync;
mod tcp;
pub mod tensors;
mod threads;
mod transport;

pub use activity::Quiet;
pub use busy::Phase;
pub use error::CollectiveError;
pub use group::{Group, GroupOptions, ReduceOp};
pub use host_name::host_name;
pub use launch::{RankFailure, run_threads};
pub use message::{Call, OpKind};
pub use phase::{PhaseGuard, PhaseLimits, Progress, Pulse};
pub use process_groups::ProcessGroups;
pub use recorder::{FlightRecord, FlightState};
pub use tcp::{ConnectOptions, JobToken, RankEnv, connect, free_port, report_start_failure};

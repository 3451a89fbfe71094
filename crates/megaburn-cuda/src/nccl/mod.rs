//! Collectives of one process a GPU, through NCCL.
//!
//! A [`Communicator`] joins the GPUs of some ranks. Its calls go through [`crate::CudaQueue`]: on
//! CubeCL's own stream ([`Lane::InOrder`]), or on a stream of the communicator beside it
//! ([`Lane::Overlapped`]). The host waits for nothing.
//!
//! - **No call blocks for ever**: communicators are NCCL's non-blocking ones. A call that NCCL is still
//!   starting is awaited on the device thread, where an abort ends the waiting.
//! - **A [`Watchdog`] looks after them**: it sees NCCL's errors and which call has waited since when,
//!   and aborts all communicators of the process when its observer says so. GPU kernels that wait
//!   for a lost peer end then, and the host that waits for them goes on.
//! - **After an abort every call fails**, and its outputs carry the reason to whoever reads them.
//!   Outputs of calls that were already on the GPU hold garbage: ask the observer before using them.

mod api;
mod call;
mod calls;
mod collectives;
mod communicator;
mod config;
mod exit;
mod lane;
mod point_to_point;
mod watchdog;

pub use api::version;
pub use call::{Label, takes};
pub use collectives::Reduction;
pub use communicator::{Communicator, Membership, UniqueId};
pub use lane::{Lane, Started};
pub use watchdog::{Observer, Standing, Watchdog};

//! Collectives of one process a GPU, through NCCL.
//!
//! A [`Communicator`] joins the GPUs of some ranks. Its calls go through [`crate::CudaQueue`]: on
//! CubeCL's own stream ([`Lane::InOrder`]), or on a stream of the communicator beside it
//! ([`Lane::Overlapped`]). The host waits for nothing.
//!
//! - **No call blocks for ever**: members meet in a non-blocking communicator, until a deadline. Calls
//!   are those of a blocking one that is split from it, since NCCL starts them three times as fast; an
//!   abort of the first ends them, wherever they are.
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
mod handles;
mod lane;
mod point_to_point;
mod rendezvous;
mod watchdog;

pub use api::version;
pub use call::{Label, takes};
pub use collectives::Reduction;
pub use communicator::{Communicator, Membership, UniqueId};
pub use lane::Lane;
pub use watchdog::{GroupStatus, Observer, Watchdog};

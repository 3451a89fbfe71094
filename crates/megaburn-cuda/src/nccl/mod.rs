//! Collectives through NCCL, with one GPU per process.
//!
//! A [`Communicator`] joins the GPUs of several ranks. Its calls go through [`crate::CudaQueue`],
//! either on CubeCL's own stream ([`Lane::InOrder`]) or on a separate stream of the communicator
//! ([`Lane::Overlapped`]). The host does not wait.
//!
//! - **No call blocks forever.** Members meet in a non-blocking communicator, with a deadline.
//!   Calls are made on a blocking communicator that is split from it, because NCCL starts them
//!   three times as fast; an abort of the first ends them at any point.
//! - **A [`PollThread`] monitors the calls.** It sees NCCL's errors and how long each call has
//!   waited, and aborts all communicators of the process when its observer says so. GPU kernels
//!   that wait for a lost peer then end, and the host that waits for them continues.
//! - **After an abort every call fails**, and readers of its outputs get the reason. Outputs of
//!   calls that were already on the GPU hold garbage: ask the observer before using them.

mod api;
mod call;
mod calls;
mod collectives;
mod communicator;
mod config;
mod exit;
mod handles;
mod lane;
mod membership;
mod point_to_point;
mod poll_thread;
mod rendezvous;

pub use api::version;
pub use call::{Label, takes};
pub use collectives::Reduction;
pub use communicator::Communicator;
pub use lane::Lane;
pub use membership::{Membership, UniqueId};
pub use poll_thread::{GroupStatus, Observer, PollThread};

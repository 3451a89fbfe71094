//! Groups on GPUs: collectives through NCCL, and what happens when they do not end.
//!
//! A group's communicator is made at the first collective on a GPU tensor, by all its members, which
//! meet over the group's host transport. That transport stays the control plane: it compares the
//! first call of each shape before NCCL sees it, and tells of ranks that died or failed.

#[cfg(feature = "cuda")]
mod calls;
#[cfg(feature = "cuda")]
mod link;
mod log;
mod max;
mod round;
#[cfg(feature = "cuda")]
mod side;
mod watch;
mod watched;

#[cfg(feature = "cuda")]
pub(crate) use calls::is_on_gpu;
#[cfg(feature = "cuda")]
pub(crate) use link::DeviceLink;
#[cfg(feature = "cuda")]
pub(crate) use max::keeping_nan;
#[cfg(feature = "cuda")]
pub(crate) use side::DeviceSide;

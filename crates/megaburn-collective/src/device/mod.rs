//! Groups on GPUs: collectives through NCCL, and the watchdog for calls that do not end.
//!
//! A group's communicator is created at the first collective on a GPU tensor, by all its members,
//! which meet over the group's host transport. That transport stays the control plane: it compares
//! the first call of each shape before NCCL sees it, and reports ranks that died or failed.

mod call_log;
#[cfg(feature = "cuda")]
mod calls;
mod heartbeat;
mod nan_max;
#[cfg(feature = "cuda")]
mod nccl_context;
#[cfg(feature = "cuda")]
mod nccl_group;
mod watchdog;
mod watched;

#[cfg(feature = "cuda")]
pub(crate) use calls::is_on_gpu;
#[cfg(feature = "cuda")]
pub(crate) use nccl_context::NcclContext;
#[cfg(feature = "cuda")]
pub(crate) use nccl_group::NcclGroup;

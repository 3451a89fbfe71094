//! Runs foreign CUDA libraries in order with CubeCL's kernels, without host synchronization.
//!
//! CubeCL launches its kernels from one thread per device, on one stream. `CudaQueue::enqueue` runs
//! a closure on that thread, between two launches, with the stream and the addresses of the given
//! buffers. Work that the closure puts on the stream runs after the producers of its inputs and
//! before the readers of its outputs; the host does not wait.
//!
//! - **Failures are values.** Failed work leaves its outputs marked as never written. The next read
//!   of one of them, or of anything computed from them, returns the failure with the operation's
//!   name and shapes.
//! - **Libraries are loaded at run time** (`libraries`): building needs neither GPU nor toolkit.
//!
//! The crate is empty without its feature `cuda`.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
#![cfg(feature = "cuda")]

use cubecl_environment::stream::{StreamPolicy, set_policy};

pub mod addresses;
mod async_op;
mod context;
pub mod cudnn;
pub mod cupti;
mod error;
pub mod events;
#[cfg(feature = "fusion")]
mod fusion;
pub mod gemm;
pub mod host;
pub mod kernel_cache;
pub mod libraries;
pub mod memory;
pub mod nccl;
pub mod nvtx;
pub mod profiler;
mod queue;
mod search;
pub mod streams;
pub mod tensor;
pub mod timing;
pub mod versions;

pub use async_op::AsyncOp;
pub use error::CudaError;
pub use queue::{Buffers, CudaQueue, Op, RawBuffer, Retained, Server};

/// Prepares this process for computing on one GPU and returns the number of GPUs that it may use.
/// Call it before the first tensor: from then on all threads of the process launch on one stream,
/// in the order of their calls, and compiled kernels are cached on disk ([`kernel_cache`]).
///
/// # Errors
/// Something is missing on the machine; see [`libraries::check`].
pub fn start() -> Result<usize, CudaError> {
    libraries::check()?;
    kernel_cache::turn_on();
    set_policy(StreamPolicy::Single);
    Ok(libraries::num_gpus())
}

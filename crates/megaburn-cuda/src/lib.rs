//! Foreign CUDA libraries in order with CubeCL's kernels, without host synchronisation.
//!
//! CubeCL launches its kernels from one thread a device, on one stream. `CudaQueue::enqueue` runs
//! a closure on that thread, between two launches, with the stream and the addresses of some
//! buffers: whatever the closure puts on the stream runs after what produced its inputs and before
//! what reads its outputs, and the host waits for nothing.
//!
//! - **A failure is a value.** Work that fails leaves its outputs marked as never written; the next
//!   read of one of them, or of anything computed from them, gives the failure with the
//!   operation's name and shapes.
//! - **Libraries are loaded at run time** (`libraries`): building needs neither GPU nor toolkit.
//!
//! The crate is empty without its feature `cuda`.
#![cfg(feature = "cuda")]

use cubecl_environment::stream::{StreamPolicy, set_policy};

pub mod addresses;
mod async_op;
mod context;
pub mod cudnn;
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

pub use async_op::AsyncOp;
pub use error::CudaError;
pub use queue::{Buffers, CudaQueue, Op, RawBuffer, Retained, Server};

/// Makes this process ready to compute on one GPU, and returns how many it may use. Called before the
/// first tensor: all threads of the process then launch on one stream, in the order of their calls, and
/// kernels compiled once are kept on disk ([`kernel_cache`]).
///
/// # Errors
/// The first thing that is missing on the machine; see [`libraries::check`].
pub fn start() -> Result<usize, CudaError> {
    libraries::check()?;
    kernel_cache::turn_on();
    set_policy(StreamPolicy::Single);
    Ok(libraries::num_gpus())
}

//! FP8 numbers on NVIDIA GPUs: the largest magnitude of a tensor, the cast of a matrix with one scale,
//! together with its transpose, and the numbers that quantised elements stand for.

mod kernels;
pub(crate) mod launch;

pub(crate) use kernels::BlockScale;
pub use launch::amax::amax;
pub use launch::cast::{Cast, CastOptions, cast};
pub(crate) use launch::numbers::{BlockOptions, block_numbers, numbers};

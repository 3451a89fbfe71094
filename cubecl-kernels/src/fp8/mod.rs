//! FP8 numbers on NVIDIA GPUs: the largest magnitude of a tensor, and the cast of a matrix with one
//! scale, together with its transpose.

mod kernels;
pub(crate) mod launch;

pub use launch::amax::amax;
pub use launch::cast::{Cast, CastOptions, cast};

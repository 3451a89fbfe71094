//! Norm kernels. A group of units processes a row; each unit takes every `units`-th vector of it.
//!
//! Forward reads a row once and keeps it in registers (`long.rs` rereads it). Statistics are f32.
//! Backward reads the saved `x`, mean and rstd, and recomputes `n = (x - mean) * rstd`. It sums
//! `dgamma` and `dbeta` in two stages of fixed order, first over the rows of each group and then
//! over the groups (`sum_parts`), without atomics, so results repeat bit for bit. The same pass adds
//! the gradient of the sum `x + residual` to `dx`.

mod backward;
mod forward;
mod long;

use cubecl::prelude::*;

pub(super) use backward::backward_kernel;
pub(super) use forward::forward_kernel;
pub(super) use long::{long_backward_kernel, long_forward_kernel};

/// The sizes of a forward kernel's tensors. Widths and strides are in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct ForwardSizes {
    pub(super) rows: u32,
    pub(super) width: u32,
    pub(super) x_stride: u32,
    pub(super) residual_stride: u32,
    /// The number of elements of a row.
    pub(super) len: f32,
    pub(super) epsilon: f32,
}

/// The sizes of a backward kernel's tensors. Widths and strides are in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct BackwardSizes {
    pub(super) rows: u32,
    pub(super) width: u32,
    pub(super) dy_stride: u32,
    pub(super) x_stride: u32,
    pub(super) dsum_stride: u32,
    /// The number of elements of a row.
    pub(super) len: f32,
    /// The number of groups, each of which has a row of partial sums.
    pub(super) groups: u32,
}

/// The compile-time parameters of a norm kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NormVariant {
    /// Whether the mean is subtracted (layer norm).
    pub(super) centered: bool,
    /// Whether rows are scaled by `1 + gamma`.
    pub(super) zero_centered_gamma: bool,
    /// Whether there is a beta.
    pub(super) beta: bool,
    /// Forward: whether a residual is added and the sum returned. Backward: whether the sum has a
    /// gradient.
    pub(super) add: bool,
    /// Whether the kernel finds the largest magnitude of what it writes: forward of the normalized
    /// rows, backward of the gradient.
    pub(super) observed: bool,
    /// Backward: the number of row buffers per group, [`STAGES`], or 0 without asynchronous copies.
    pub(super) stages: u32,
}

/// The number of stages if there are any; enough bytes in flight to hide the memory latency.
pub(super) const STAGES: u32 = 3;

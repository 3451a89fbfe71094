//! Norm kernels. A team of units processes a row; each unit takes every `units`-th vector of it.

mod backward;
mod forward;
mod long;

pub(super) use backward::backward_kernel;
pub(super) use forward::forward_kernel;
pub(super) use long::{long_backward_kernel, long_forward_kernel};

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
    /// Backward: the number of row buffers per team, [`STAGES`], or 0 without asynchronous copies.
    pub(super) stages: u32,
}

/// The number of stages if there are any; enough bytes in flight to hide the memory latency.
pub(super) const STAGES: u32 = 3;

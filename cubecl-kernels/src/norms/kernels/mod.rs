//! The kernels of norms. A team of units has a row, every unit of it each `units`-th vector.

mod backward;
mod forward;
mod long;

pub(super) use backward::backward_kernel;
pub(super) use forward::forward_kernel;
pub(super) use long::{long_backward_kernel, long_forward_kernel};

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NormVariant {
    /// Layer norm.
    pub(super) centered: bool,
    /// Rows are scaled by `1 + gamma`.
    pub(super) zero_centered_gamma: bool,
    /// There is a beta.
    pub(super) beta: bool,
    /// Forward: a residual is added, and the sum is a result. Backward: the sum has a gradient.
    pub(super) add: bool,
    /// Backward: rows of a team that it works on or that come by asynchronous copies, [`STAGES`], or 0
    /// where there are none.
    pub(super) stages: u32,
}

/// How many stages there are if any: enough bytes on their way for the memory's latency.
pub(super) const STAGES: u32 = 3;

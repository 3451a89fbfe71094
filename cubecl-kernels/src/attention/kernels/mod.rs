//! The kernels of attention.

pub(super) mod flash;
pub(super) mod scores;

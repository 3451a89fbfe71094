//! Launches of the kernels on CubeCL's tensors.

pub(crate) mod amax;
pub(crate) mod cast;

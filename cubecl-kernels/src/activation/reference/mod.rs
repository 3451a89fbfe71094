//! The definitions of the activations.

pub(crate) mod clamped_swiglu;
pub(crate) mod geglu;
pub(crate) mod gelu;
pub(crate) mod squared_relu;
pub(crate) mod swiglu;

//! Multi-token prediction.

pub(crate) mod grid;
pub(crate) mod runs;
pub(crate) mod transformers;

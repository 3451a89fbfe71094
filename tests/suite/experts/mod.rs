//! Mixtures of experts.

pub(crate) mod biases;
pub(crate) mod deepseek;
pub(crate) mod grid;
pub(crate) mod options;
mod padded;
pub(crate) mod runs;
pub(crate) mod transformers;
pub(crate) mod upcycling;

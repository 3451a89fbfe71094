//! Training with quantised matrices.

mod layouts;
mod runs;
mod schedule;
pub(crate) mod support;

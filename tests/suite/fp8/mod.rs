//! Training with quantised matrices.

mod layouts;
mod runs;
mod schedule;
mod support;

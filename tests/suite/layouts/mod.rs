//! Layouts: tensor, pipeline, sequence and data parallelism, each against one rank.

pub(crate) mod dropout;
pub(crate) mod gradients;
pub(crate) mod grid;
pub(crate) mod pipeline_runs;
pub(crate) mod pipelines;
pub(crate) mod recompute;
pub(crate) mod refused;

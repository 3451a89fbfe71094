//! Context parallelism and packed sequences.

pub(crate) mod grid;
pub(crate) mod hybrid_runs;
pub(crate) mod packed;

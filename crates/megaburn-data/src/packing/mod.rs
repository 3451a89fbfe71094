//! Best-fit packing: documents fill the samples of a run with little padding, and only documents
//! that are longer than a sample are cut.
//!
//! A document is one chunk, or several if it is longer than a sample. The chunks are packed into
//! bins of `seq_len` positions by best-fit decreasing; a bin is a sample.
//!
//! Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830).

mod best_fit;
mod chunks;
mod files;
mod pack;
mod packed_sampler;
mod stats;
#[cfg(test)]
mod tests;

pub use packed_sampler::{PackedSampler, PackedSamplerConfig};
pub use stats::PackingStats;

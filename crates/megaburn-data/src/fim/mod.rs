//! Fill-in-the-middle: documents in another order, so that a model learns to write the middle of a
//! text whose beginning and end it reads.
//!
//! Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle";
//! `fim_dataset.py` of Megatron-LM.

mod characters;
mod config;
mod decisions;
mod samples;
mod sentinels;
#[cfg(test)]
mod tests;
mod transform;

pub use config::FimConfig;
pub use samples::FimSamples;

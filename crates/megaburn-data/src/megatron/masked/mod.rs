//! The samples of Megatron-LM for masked language models: those of BERT and of T5.
//!
//! A sample is made of whole sentences of a document. Which ones is decided once, for all samples,
//! and is kept in a folder as Megatron-Core's `sample_index.npy`. What is masked is decided by a
//! generator of random numbers that each sample seeds with its own number, so samples can be read
//! in any order.
//!
//! Source: `megatron/core/datasets` of megatron-core 0.16.1 (`masked_dataset.py`,
//! `bert_dataset.py`, `t5_dataset.py`, `helpers.cpp`).

mod bert;
mod bert_sample;
mod config;
mod mapping;
mod masking;
mod masking_config;
mod ngrams;
mod pieces;
mod sentences;
mod t5;
mod t5_sample;
#[cfg(test)]
mod tests;

pub use bert::{BertDataset, BertDatasetConfig, BertSettings};
pub use bert_sample::BertSample;
pub use config::{MaskedDatasetConfig, MaskedKind};
pub use masking_config::MaskingConfig;
pub use t5::{T5Dataset, T5DatasetConfig, T5Settings};
pub use t5_sample::T5Sample;

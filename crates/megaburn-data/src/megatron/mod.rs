//! The samples of Megatron-LM in its order: sample `i` has the tokens of sample `i` there.
//!
//! A [`SequenceRange`] is a data set or a part of it, a [`GptDataset`] the samples of one. Its
//! indices are built once, by one process of a host, and
//! kept in a folder as `.npy` files with the contents that Megatron-Core's own files have.
//!
//! Source: `megatron/core/datasets` of megatron-core 0.16.1 (`gpt_dataset.py`,
//! `helpers.cpp`).

mod cache;
mod epochs;
mod event;
mod gpt;
mod gpt_index;
mod npy;
mod random;
mod sequences;

pub use event::IndexEvent;
pub use gpt::{GptDataset, GptDatasetConfig};
pub use sequences::SequenceRange;

//! The samples of Megatron-LM in its order: sample `i` has the tokens of sample `i` there.
//!
//! A [`SequenceRange`] is a data set or a part of it, a [`GptDataset`] the samples of one, and a
//! [`BlendedDataset`] those of several. A [`DocumentRange`] is a data set of sentences, of which a
//! [`BertDataset`] and a [`T5Dataset`] make masked samples. Their indices are built once, by one
//! process of a host, and kept in a folder as `.npy` files with the contents that Megatron-Core's
//! own files have.
//!
//! Source: `megatron/core/datasets` of megatron-core 0.16.1 (`gpt_dataset.py`,
//! `blended_dataset.py`, `blended_megatron_dataset_builder.py`, `helpers.cpp`) on x86-64.

mod blend;
mod blended;
mod documents;
mod epochs;
mod gpt;
mod gpt_index;
mod masked;
mod mid_level;
mod random;
mod sequences;
#[cfg(test)]
mod tests;

pub use blended::{BlendedDataset, BlendedDatasetConfig};
pub use documents::DocumentRange;
pub use gpt::{GptDataset, GptDatasetConfig};
pub use masked::{
    BertDataset, BertDatasetConfig, BertSample, BertSettings, MaskedDatasetConfig, MaskedKind,
    MaskingConfig, T5Dataset, T5DatasetConfig, T5Sample, T5Settings,
};
pub use mid_level::{MidLevelConfig, MidLevelDataset};
pub use sequences::SequenceRange;

//! Megatron-LM's indexed data sets: `PREFIX.bin` has the tokens of all documents, `PREFIX.idx` says
//! where sequences and documents begin. The files are byte for byte those that Megatron-LM writes.
//!
//! Source: `megatron/core/datasets/indexed_dataset.py`.

mod bytes;
mod dataset;
mod files;
mod index;
mod lengths;
mod merge;
mod section;
mod split;
#[cfg(test)]
mod tests;
mod token_type;
mod tokens;

pub use dataset::{DocumentSize, IndexedDataset};
pub(crate) use index::{Header, i32s, i64s, write_index};
pub use lengths::LengthHistogram;
pub use merge::merge;
pub use split::{DocumentSplit, split};
pub use token_type::TokenType;

use std::path::{Path, PathBuf};

/// `prefix` with an ending such as `.bin`, which is added to its last component.
pub(crate) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

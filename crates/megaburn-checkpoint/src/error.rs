use std::{io, path::Path, path::PathBuf};

use megaburn_collective::CollectiveError;
use thiserror::Error;

/// Why a checkpoint was not saved or cannot be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum CheckpointError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{file} is damaged: {why}")]
    Damaged { file: PathBuf, why: String },
    #[error(
        "{path} has checkpoint format {found}, and this version reads format {supported}; use the version of megaburn that wrote it"
    )]
    UnknownVersion { path: PathBuf, found: u64, supported: u64 },
    #[error("{path} has no tensor `{name}`; the nearest is `{nearest}`")]
    MissingTensor { path: PathBuf, name: String, nearest: String },
    #[error(
        "{path}: tensor `{name}` has global shape {found:?} and {expected:?} is wanted: it is a checkpoint of another model"
    )]
    GlobalShape { path: PathBuf, name: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("{path}: tensor `{name}` is {found} and {expected} is wanted")]
    Dtype { path: PathBuf, name: String, expected: String, found: String },
    #[error("tensor `{name}` is {dtype}, which checkpoints do not hold")]
    UnsupportedDtype { name: String, dtype: String },
    #[error(
        "tensor `{name}` to be saved has {found} elements, and its shard {expected} on this rank"
    )]
    LocalShape { name: String, found: usize, expected: usize },
    #[error("tensor `{name}` cannot be saved: {why}")]
    Untiled { name: String, why: String },
    #[error("rank {rank} failed: {message}")]
    Peer { rank: usize, message: String },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

/// Names the path and what was done with it.
pub(crate) trait IoContext<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, CheckpointError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|source| CheckpointError::Io { action, path: path.to_path_buf(), source })
    }
}

impl CheckpointError {
    pub(crate) fn damaged(file: &Path, why: impl Into<String>) -> Self {
        Self::Damaged { file: file.to_path_buf(), why: why.into() }
    }
}

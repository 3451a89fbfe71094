use std::path::PathBuf;

use megaburn_kernels::KernelError;
use megaburn_mesh::MeshError;
use megaburn_parallel::ParallelError;
use thiserror::Error;

/// Why a model cannot be built, read or compared.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum ModelError {
    #[error("model configuration: {0}")]
    Config(String),
    #[error("{0}")]
    Generate(String),
    #[error(transparent)]
    Layout(#[from] MeshError),
    #[error(transparent)]
    Layer(#[from] ParallelError),
    #[error(transparent)]
    Checkpoint(#[from] megaburn_checkpoint::CheckpointError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("{}: {why}", path.display())]
    File { path: PathBuf, why: String },
    #[error("{}: tensor `{name}`: {why}", path.display())]
    Tensor {
        path: PathBuf,
        name: String,
        why: String,
    },
}

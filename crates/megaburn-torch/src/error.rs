use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::pickle::PickleError;

/// Why a file of PyTorch cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum TorchError {
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("`{}` cannot be read: {why}", path.display())]
    OtherKind { path: PathBuf, why: String },
    #[error("`{}` is damaged: {why}; copy or save it again", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("`{}` is damaged: its pickle{entry} cannot be read: {source}", path.display())]
    Pickle {
        path: PathBuf,
        entry: String,
        source: PickleError,
    },
    #[error(
        "`{}` was saved on a big-endian machine; load it with torch.load and save it again on a \
        little-endian one",
        path.display()
    )]
    BigEndian { path: PathBuf },
    #[error("the tensor `{name}` of `{}` cannot be read: {why}", path.display())]
    Tensor {
        path: PathBuf,
        name: String,
        why: String,
    },
    #[error("`{}` has {count} {kind}s, but no {kind} `{name}`", path.display())]
    Missing {
        path: PathBuf,
        kind: &'static str,
        name: String,
        count: usize,
    },
    #[error("the tensor `{name}` cannot be written to `{}`: {why}", path.display())]
    Write {
        path: PathBuf,
        name: String,
        why: String,
    },
    #[error("`{}` exists and is not replaced; choose another folder, or remove it yourself", path.display())]
    Exists { path: PathBuf },
    #[error(
        "the optimizer's state in `{}` cannot be read by the names of parameters: {why}",
        path.display()
    )]
    OptimizerForm { path: PathBuf, why: String },
    #[error(
        "a tensor in the storage `{key}` of `{}` cannot be read: {why}",
        path.display()
    )]
    Storage {
        path: PathBuf,
        key: String,
        why: String,
    },
    #[error("the entry `{name}` of a checkpoint cannot be read: {source}")]
    Entry {
        name: String,
        source: Box<TorchError>,
    },
}

use std::path::PathBuf;

use burn::store::RecordError;
use burn_store::burn_pack;
use megaburn_collective::{CollectiveError, ShardsError};
use megaburn_parallel::ParallelError;
use thiserror::Error;

/// Why a file or record of a full module was not read into shards, or not written from them.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum RecordsError {
    #[error(
        "{path}: Burn 0.22 has no recorders, so `.{extension}` cannot be read or written; load the \
        file with Burn 0.21 or older and save it there with `burn-store` as `.bpk` or `.safetensors`"
    )]
    OldRecorder { path: PathBuf, extension: String },
    #[error(
        "{path}: the format is unknown; the name of the file must end in `.bpk`, `.safetensors`, \
        `.pt`, `.pth` or `.bin`"
    )]
    Format { path: PathBuf },
    #[error(
        "{path}: PyTorch's own files are only read; write `.safetensors` with \
        `.with_layout(Layout::Torch)`, which `safetensors.torch.load_file` reads"
    )]
    TorchIsReadOnly { path: PathBuf },
    #[error("{path} exists; choose another name, or replace it with `.with_overwrite(true)`")]
    Exists { path: PathBuf },
    #[error("cannot {action} {what}: {why}")]
    File {
        action: &'static str,
        what: String,
        why: String,
    },
    #[error(
        "the source has no tensor `{name}`, which the module needs with shape {shape:?} ({others} \
        more are missing); the layout is {layout}"
    )]
    Missing {
        name: String,
        shape: Vec<usize>,
        others: usize,
        layout: &'static str,
    },
    #[error(
        "the module has no parameter for tensor `{name}` of the source, with shape {shape:?} \
        ({others} more are unexpected); the layout is {layout}; names that the model has no use for are \
        ignored by `RecordFile::with_ignored` or `load_from_ignoring`"
    )]
    Unexpected {
        name: String,
        shape: Vec<usize>,
        others: usize,
        layout: &'static str,
    },
    #[error(
        "tensor `{name}` is {found:?} in the source, but the full parameter is {expected:?}{hint}; \
        the layout is {layout}"
    )]
    Shape {
        name: String,
        found: Vec<usize>,
        expected: Vec<usize>,
        hint: String,
        layout: &'static str,
    },
    #[error("tensor `{name}` is {found} in the source, but the parameter holds {expected}")]
    Kind {
        name: String,
        found: String,
        expected: &'static str,
    },
    #[error(
        "tensor `{name}` is quantised; shards are cut from floats and put together as floats: quantise \
        a module after it was read, and save it before"
    )]
    Quantised { name: String },
    #[error("rank 0 could not write the file: {why}")]
    OnFirst { why: String },
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Pack(#[from] burn_pack::Error),
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    #[error(transparent)]
    Shards(#[from] ShardsError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

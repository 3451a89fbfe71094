use std::{io, path::Path, path::PathBuf};

use megaburn_collective::CollectiveError;
use megaburn_store::StoreError;
use megaburn_torch::TorchError;
use thiserror::Error;

/// Why a checkpoint was not saved or cannot be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum CheckpointError {
    #[error("cannot {action} {path}: {source}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "host {host} cannot {action} {path}: {source}; this is not damage, so no older \
        checkpoint is used instead: restore access and start again"
    )]
    Unreadable {
        host: String,
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "host {host} does not have {path}, which other ranks have; all hosts must share the same \
        folder"
    )]
    NotEverywhere { host: String, path: PathBuf },
    #[error(
        "rank {rank} on host {host} does not see the folder {path} of its host; mount it there, or \
        give the host another name with MEGABURN_HOST"
    )]
    NotOfHost {
        rank: usize,
        host: String,
        path: PathBuf,
    },
    #[error(
        "{path} is the same folder on hosts {host} and {other}; put {{host}} into the path for a \
        folder of each host"
    )]
    OfTwoHosts {
        host: String,
        other: String,
        path: PathBuf,
    },
    #[error("{message}")]
    NoReadableCopy { message: String },
    #[error("{file} is damaged: {why}")]
    Damaged { file: PathBuf, why: String },
    #[error("{file} is missing: the checkpoint is incomplete")]
    Missing { file: PathBuf },
    #[error(
        "{path} has checkpoint format {found}, but this version reads formats 2 to {supported}; use \
        the version of megaburn that wrote it"
    )]
    UnknownVersion {
        path: PathBuf,
        found: u64,
        supported: u64,
    },
    #[error("{path} has no tensor `{name}`; the nearest is `{nearest}`")]
    MissingTensor {
        path: PathBuf,
        name: String,
        nearest: String,
    },
    #[error(
        "{path}: tensor `{name}` has global shape {found:?}, but the model has {expected:?}: the \
        checkpoint is of another model"
    )]
    GlobalShape {
        path: PathBuf,
        name: String,
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    #[error("{path}: tensor `{name}` is {found}, but must be {expected}")]
    Dtype {
        path: PathBuf,
        name: String,
        expected: String,
        found: String,
    },
    #[error("tensor `{name}` is {dtype}, which checkpoints do not support")]
    UnsupportedDtype { name: String, dtype: String },
    #[error(
        "cannot save tensor `{name}`: it has {found} elements, but its shard has {expected} on \
        this rank"
    )]
    LocalShape {
        name: String,
        found: usize,
        expected: usize,
    },
    #[error("cannot save tensor `{name}`: {why}")]
    Untiled { name: String, why: String },
    #[error("cannot read tensor `{name}` to save it: {why}")]
    Source { name: String, why: String },
    #[error("cannot start a thread that works on files: {source}")]
    NoThread { source: io::Error },
    #[error("the thread `{thread}` panicked")]
    Panicked { thread: &'static str },
    #[error("{path} was not finished, because the save was given up")]
    Cancelled { path: PathBuf },
    #[error("`{name}` has values that are not finite")]
    NotFinite { name: String },
    #[error(
        "`{name}` has values that are not finite, which FP8 cannot hold: export an earlier checkpoint, \
        or export without --quantize"
    )]
    NotQuantizable { name: String },
    #[error("refusing to write to {path}: {why}; nothing of this checkpoint was saved")]
    Guarded { path: PathBuf, why: String },
    #[error("{path} exists; choose another path or replace it with --force")]
    Exists { path: PathBuf },
    #[error(
        "{path} exists, so no {what} is written there; choose another path, or remove it yourself"
    )]
    NewOnly { path: PathBuf, what: &'static str },
    #[error(
        "{path} exists and is not just a {what} ({why}), so --force does not replace it; choose \
        another path or remove it yourself"
    )]
    NotReplaced {
        path: PathBuf,
        what: &'static str,
        why: String,
    },
    #[error(
        "{path} is written and has its final name, but its parent folder could not be synced to \
        disk ({source}): it may be lost in a power failure"
    )]
    NotDurable { path: PathBuf, source: io::Error },
    #[error("`{path}` is not a relative path inside the folder that is being written")]
    OutsidePath { path: String },
    #[error(
        "{path} has neither `model.safetensors` nor `model.safetensors.index.json`, and neither \
        `pytorch_model.bin`, `pytorch_model.bin.index.json` nor one `.pt` or `.pth` file"
    )]
    NoWeights { path: PathBuf },
    #[error(
        "{path} has several files that may hold its weights ({files}); rename the file with the \
        weights to `pytorch_model.bin`, or move the others away"
    )]
    SeveralWeights { path: PathBuf, files: String },
    #[error(transparent)]
    Torch(TorchError),
    #[error(
        "{file}: tensor `{name}` is {dtype}, which megaburn does not support; convert it to \
        BF16, F16 or F32 first"
    )]
    UnreadableDtype {
        file: PathBuf,
        name: String,
        dtype: String,
    },
    #[error("{path}: {why}")]
    Quantized { path: PathBuf, why: String },
    #[error("{file}: tensor `{name}` is {dtype}: {why}")]
    QuantizedTensor {
        file: PathBuf,
        name: String,
        dtype: &'static str,
        why: String,
    },
    #[error("{path}: tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape {
        path: PathBuf,
        name: String,
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    #[error(
        "{path}: tensors of different element types would be merged into one: {tensors}; choose \
        an element type with --dtype"
    )]
    MixedDtypes { path: PathBuf, tensors: String },
    #[error("`{name}` cannot be made from tensor `{tensor}` of shape {shape:?}: {why}")]
    Entry {
        name: String,
        tensor: String,
        shape: Vec<usize>,
        why: String,
    },
    #[error("cannot convert to element type {dtype}; use F64, F32, F16 or BF16")]
    NoFloat { dtype: String },
    #[error(
        "the weights of an average are {weights:?}: each must be 0 or more, and their sum more than \
        0 and finite"
    )]
    Weights { weights: Vec<f64> },
    #[error("tensor `{name}` cannot be averaged: {why}")]
    Averaged { name: String, why: String },
    #[error(
        "{path} changed after the checkpoints were verified, so nothing more is deleted; start again"
    )]
    Changed { path: PathBuf },
    #[error("rank {rank} failed: {message}")]
    Peer {
        rank: usize,
        message: String,
        is_damage: bool,
        is_not_finite: bool,
    },
    #[error(
        "`{url}` holds checkpoints of run {found}, and this is run {own}: choose another prefix, or \
        start in an empty folder to continue run {found}"
    )]
    StoreOfOtherRun {
        url: String,
        found: String,
        own: String,
    },
    #[error(
        "`{url}` has objects that megaburn did not write, such as `{name}`, which are not replaced: \
        remove them, or choose another prefix"
    )]
    StoreTaken { url: String, name: String },
    #[error(
        "another start of this run has taken over `{url}`, so this one stops: run {run_id} must be \
        started only once at a time"
    )]
    StoreTakenOver { url: String, run_id: String },
    #[error(
        "`{url}` is a complete checkpoint without the mark of a run: {why}; move it elsewhere, or \
        choose another prefix"
    )]
    StoreUnowned { url: String, why: String },
    #[error("`{url}` is not a whole checkpoint: {why}")]
    NotStored { url: String, why: String },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

/// Adds the path and the attempted action to an I/O error.
pub(crate) trait IoContext<T>: Sized {
    fn during(self, action: &'static str, path: &Path) -> Result<T, CheckpointError>;

    /// For reading a file that must exist: its absence counts as damage.
    fn during_read(self, path: &Path) -> Result<T, CheckpointError> {
        self.during("read", path).map_err(|error| match error {
            CheckpointError::Io {
                path: file, source, ..
            } if source.kind() == io::ErrorKind::NotFound => CheckpointError::Missing { file },
            other => other,
        })
    }
}

impl<T> IoContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|source| CheckpointError::Io {
            action,
            path: path.to_path_buf(),
            source,
        })
    }
}

fn is_damage(error: &TorchError) -> bool {
    match error {
        TorchError::Damaged { .. } | TorchError::Pickle { .. } => true,
        TorchError::Entry { source, .. } => is_damage(source),
        _ => false,
    }
}

impl From<TorchError> for CheckpointError {
    fn from(error: TorchError) -> Self {
        match error {
            TorchError::Entry { source, .. } if matches!(*source, TorchError::Io { .. }) => {
                Self::from(*source)
            }
            TorchError::Io { path, source, .. }
                if source.kind() == io::ErrorKind::UnexpectedEof =>
            {
                Self::damaged(&path, "it became shorter while it was being read")
            }
            TorchError::Io {
                action,
                path,
                source,
            } => Self::Io {
                action,
                path,
                source,
            },
            other => Self::Torch(other),
        }
    }
}

impl CheckpointError {
    /// Whether the error shows that the contents of a checkpoint or model differ from what was
    /// written: a wrong hash, a truncated or missing file, an unreadable header. Another checkpoint
    /// may then help.
    ///
    /// All other errors say nothing about the contents: the system could not open or read the files
    /// (no permission, an I/O error, too many open files), they belong to another model or version,
    /// or a rank is gone. A retry, or repairing the system, may then help.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::Missing { .. } => true,
            Self::Torch(error) => is_damage(error),
            Self::Peer { is_damage, .. } => *is_damage,
            _ => false,
        }
    }

    /// Whether a tensor was not saved because its values are not finite, on this rank or another.
    pub fn is_not_finite(&self) -> bool {
        match self {
            Self::NotFinite { .. } => true,
            Self::Peer { is_not_finite, .. } => *is_not_finite,
            _ => false,
        }
    }

    /// Whether another run, or another start of this run, has taken over the folder or the store.
    pub fn is_taken_over(&self) -> bool {
        matches!(self, Self::Guarded { .. } | Self::StoreTakenOver { .. })
    }

    pub(crate) fn damaged(file: &Path, why: impl Into<String>) -> Self {
        Self::Damaged {
            file: file.to_path_buf(),
            why: why.into(),
        }
    }
}

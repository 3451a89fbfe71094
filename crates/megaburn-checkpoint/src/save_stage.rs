//! The work of a rank's thread in each stage of an asynchronous save.

use std::{fmt, path::PathBuf, sync::Arc};

use crate::{
    background::Background,
    error::CheckpointError,
    report::Report,
    retention::Known,
    unfinished_checkpoint::{Sealed, UnfinishedCheckpoint},
    verification::Found,
};

/// Checkpoints of which a rank has verified its part, and what it found.
pub(crate) type VerifiedParts = Vec<(PathBuf, Found)>;

/// The stage of an asynchronous save.
pub(crate) enum Stage {
    Write {
        // Dropped first, so that the thread has ended when the folder is removed.
        work: Background<Result<Report, CheckpointError>>,
        folder: UnfinishedCheckpoint,
    },
    /// Only rank 0 works.
    Seal {
        work: Option<Background<Result<Sealed, CheckpointError>>>,
        folder: UnfinishedCheckpoint,
    },
    Replicate {
        // Dropped first, as above.
        work: Background<Result<Sealed, CheckpointError>>,
        folder: Arc<UnfinishedCheckpoint>,
    },
    /// Returns the checkpoints that count for the retention.
    Commit(Background<Result<Vec<Known>, CheckpointError>>),
    Verify {
        work: Background<VerifiedParts>,
        own: Vec<Known>,
    },
    Delete(Background<Result<(), CheckpointError>>),
    Done,
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write { .. } => "Write",
            Self::Seal { .. } => "Seal",
            Self::Replicate { .. } => "Replicate",
            Self::Commit(_) => "Commit",
            Self::Verify { .. } => "Verify",
            Self::Delete(_) => "Delete",
            Self::Done => "Done",
        })
    }
}

impl Stage {
    /// Whether this rank's thread has ended.
    pub(crate) fn is_done(&self) -> bool {
        match self {
            Self::Write { work, .. } => work.is_done(),
            Self::Seal { work, .. } => work.as_ref().is_none_or(Background::is_done),
            Self::Replicate { work, .. } => work.is_done(),
            Self::Commit(work) => work.is_done(),
            Self::Verify { work, .. } => work.is_done(),
            Self::Delete(work) => work.is_done(),
            Self::Done => true,
        }
    }
}

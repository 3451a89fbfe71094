use std::{io, path::PathBuf};

use thiserror::Error;

/// Why something cannot be reported.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum ReportError {
    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("`{}` was not written by a run: move it, or set log.csv = false", path.display())]
    NotATable { path: PathBuf },
    #[error("cannot start a thread for the logs: {source}")]
    Thread { source: io::Error },
    #[error("`{}` is not the trace of a profile of megaburn: {why}", path.display())]
    NotATrace { path: PathBuf, why: String },
    #[error("cannot draw the loss curve: {why}")]
    Plot { why: String },
    #[error("cannot draw the lengths of documents: {why}")]
    LengthPlot { why: String },
}

impl ReportError {
    /// Whether a file that is read or written is not what it must be.
    pub fn is_bad_input(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::NotATable { .. } | Self::NotATrace { .. }
        )
    }
}

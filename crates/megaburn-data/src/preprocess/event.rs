//! What is reported while files are encoded, and at the end.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What happens while files are encoded.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum PreprocessEvent {
    /// The files were found.
    Found {
        /// Number of files.
        num_files: usize,
        /// Their size on the disk.
        num_bytes: u64,
        /// Number of files in folders that were left out, because their endings are not of text,
        /// and of linked folders.
        num_left_out: usize,
    },
    /// The work of an earlier process is continued.
    Resumed(PreprocessCounts),
    /// A record was skipped; the text says which and why.
    Skipped(String),
    /// More documents were written.
    Progress {
        /// Bytes of the files that were read.
        read_bytes: u64,
        /// What was written so far.
        counts: PreprocessCounts,
    },
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreprocessCounts {
    /// Number of documents of each data set.
    pub documents: u64,
    /// Number of tokens of all data sets.
    pub tokens: u64,
    /// Number of documents of all data sets that have no tokens.
    pub empty: u64,
    /// Number of records that were skipped.
    pub skipped: u64,
}

/// The data sets that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreprocessSummary {
    /// Their paths without `.bin` and `.idx`.
    pub prefixes: Vec<PathBuf>,
    /// What they hold.
    pub counts: PreprocessCounts,
}

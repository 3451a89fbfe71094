//! How far a run is.

use serde::{Deserialize, Serialize};

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of optimizer steps done, including skipped ones.
    pub step: u64,
    /// Number of training samples read.
    pub consumed_samples: u64,
    /// Number of these steps that were skipped, because their gradient overflowed or exceeded the
    /// threshold.
    #[serde(default)]
    pub skipped_steps: u64,
    /// Number of samples of the skipped steps, for which schedules do not advance.
    #[serde(default)]
    pub skipped_samples: u64,
}

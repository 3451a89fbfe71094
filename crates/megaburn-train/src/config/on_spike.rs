//! `train.on_spike`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What follows a spike of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum OnSpike {
    /// Nothing: the step counts as any other.
    #[default]
    None,
    /// The step is skipped: its samples are consumed, and no weight changes.
    Skip,
    /// The run ends with exit code 3, with the weights of the step before.
    Stop,
    /// The run reloads its last checkpoint, and all steps since count as skipped: their samples are
    /// not read again. A custom loop skips the step.
    Rollback,
}

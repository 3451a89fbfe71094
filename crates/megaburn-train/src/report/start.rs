use serde::Serialize;

use crate::config::Change;

/// One start of a run: a line of `metrics.jsonl`, before the lines of its steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct StartMetrics {
    /// The number of this start of the run, counted from 1.
    pub(super) start: u64,
    /// The run's id, as in `run.json`.
    pub(super) run_id: String,
    /// The time of the start in UTC, as RFC 3339.
    pub(super) time: String,
    /// The layout from this start on.
    pub(super) layout: String,
    /// The step after which the run continues; 0 at its beginning.
    pub(super) from_step: u64,
    /// With `megaburn launch --restarts`, the number of the restart that this start is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) restart: Option<usize>,
    /// Why the launcher started the ranks again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cause: Option<String>,
    /// The keys that differ from the run's previous record.
    pub(super) changes: Vec<Change>,
}

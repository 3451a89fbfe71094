use serde::Serialize;

use crate::config::Change;

/// One start of a run: a line of `metrics.jsonl`, before the lines of its steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StartMetrics {
    /// The number of this start of the run, counted from 1.
    pub start: u64,
    /// The run's id, as in `run.json`.
    pub run_id: String,
    /// The time of the start in UTC, as RFC 3339.
    pub time: String,
    /// The layout from this start on.
    pub layout: String,
    /// The step after which the run continues; 0 at its beginning.
    pub from_step: u64,
    /// The keys that differ from the run's previous record.
    pub changes: Vec<Change>,
}

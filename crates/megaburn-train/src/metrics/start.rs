use serde::Serialize;

use crate::config::Change;

/// One start of a run: a line of `metrics.jsonl`, before those of the steps that follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StartMetrics {
    /// Which start of the run it is, counted from 1.
    pub start: u64,
    /// The run, as `run.json` names it.
    pub run_id: String,
    /// When it was, in UTC, as RFC 3339.
    pub time: String,
    /// How the run is split over ranks from here on.
    pub layout: String,
    /// The step after which it goes on; 0 at the beginning.
    pub from_step: u64,
    /// What is set otherwise than the run recorded before.
    pub changes: Vec<Change>,
}

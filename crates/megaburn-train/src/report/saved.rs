//! The lines of checkpoints in the metrics.

use std::{
    fs::{self, DirEntry},
    io,
    path::Path,
};

use megaburn_report::metrics::{CheckpointMetrics, StoredCheckpointMetrics};
use serde_json::Value;

use super::Reporter;
use crate::{
    error::TrainError, run_folder::names::METRICS, saves::SavedCheckpoint,
    stored_checkpoints::UploadedCheckpoint,
};

impl Reporter<'_> {
    /// Records a checkpoint that was saved in `path`.
    pub(crate) fn saved(&mut self, saved: &SavedCheckpoint, path: &Path) -> Result<(), TrainError> {
        self.alerts.progress();
        let len = |entry: io::Result<DirEntry>| Ok::<u64, io::Error>(entry?.metadata()?.len());
        let bytes = fs::read_dir(path).and_then(|files| files.map(len).sum());
        self.metrics.write_line(&CheckpointMetrics {
            checkpoint: saved.step,
            seconds: saved.seconds.as_secs_f64(),
            waited_seconds: saved.waited.as_secs_f64(),
            bytes: bytes.ok(),
        })
    }

    /// Records a checkpoint that was uploaded.
    pub(crate) fn uploaded(&mut self, uploaded: &UploadedCheckpoint) -> Result<(), TrainError> {
        self.metrics.write_line(&StoredCheckpointMetrics {
            stored_checkpoint: uploaded.step,
            url: uploaded.url.clone(),
            seconds: uploaded.seconds.as_secs_f64(),
            bytes: uploaded.num_bytes,
        })
    }
}

/// The steps of the checkpoints that `metrics.jsonl` of the run in `dir` names, in the order of lines.
pub(crate) fn saved_steps(dir: &Path) -> impl DoubleEndedIterator<Item = u64> {
    let text = fs::read_to_string(dir.join(METRICS)).unwrap_or_default();
    let step = |line: &str| serde_json::from_str::<Value>(line).ok()?["checkpoint"].as_u64();
    let steps: Vec<u64> = text.lines().filter_map(step).collect();
    steps.into_iter()
}

//! The line of a checkpoint in the metrics.

use std::{
    fs::{self, DirEntry},
    io,
    path::Path,
};

use megaburn_report::metrics::CheckpointMetrics;

use super::Reporter;
use crate::{error::TrainError, saves::SavedCheckpoint};

impl Reporter<'_> {
    /// Records a checkpoint that was saved in `path`.
    pub(crate) fn saved(&mut self, saved: &SavedCheckpoint, path: &Path) -> Result<(), TrainError> {
        let len = |entry: io::Result<DirEntry>| Ok::<u64, io::Error>(entry?.metadata()?.len());
        let bytes = fs::read_dir(path).and_then(|files| files.map(len).sum());
        self.metrics.write_line(&CheckpointMetrics {
            checkpoint: saved.step,
            seconds: saved.seconds.as_secs_f64(),
            waited_seconds: saved.waited.as_secs_f64(),
            bytes: bytes.ok(),
        })
    }
}

//! What all logs have in common.

use super::append_file::AppendFile;
use crate::metrics::MetricsRecord;

/// A format that metrics are written in.
pub(super) trait Log: Send {
    /// Writes a step or an evaluation.
    fn write(&mut self, record: &MetricsRecord);

    /// Writes what ends a run whose process exits with this code.
    fn end(&mut self, exit_code: u8);

    /// The file that records are appended to, if there is one.
    fn file(&mut self) -> Option<&mut AppendFile>;
}

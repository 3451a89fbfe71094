//! Reports a rank that is slower than the others.

use serde::Serialize;

use super::Reporter;
use crate::{error::TrainError, stragglers::PlacedStraggler};

/// A straggler: a line of `metrics.jsonl`, after that of the step in which it was found.
#[derive(Debug, Serialize)]
struct StragglerMetrics<'a> {
    /// The step.
    straggler: u64,
    rank: usize,
    host: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<usize>,
    /// The part of a step that takes most of the additional time.
    section: &'a str,
    /// How much longer the rank's own work takes than that of the others, as a fraction.
    slower: f64,
}

impl Reporter<'_> {
    /// Reports a rank that is slower than the others.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn straggler(
        &mut self,
        step: u64,
        found: &PlacedStraggler,
    ) -> Result<(), TrainError> {
        let PlacedStraggler { straggler, place } = found;
        let rank = straggler.rank;
        let section = straggler.part.as_str();
        self.metrics.write_line(&StragglerMetrics {
            straggler: step,
            rank,
            host: &place.host,
            gpu: place.gpu,
            section,
            slower: (straggler.slower * 1e4).round() / 1e4,
        })?;
        let gpu = place
            .gpu
            .map_or(String::new(), |gpu| format!(", GPU {gpu}"));
        let host = &place.host;
        let percent = 100.0 * straggler.slower;
        self.console.line(format!(
            "warning  rank {rank} (host {host}{gpu}) is a straggler: its own work takes {percent:.0}% \
            longer than that of the others, most of it in `{section}`"
        ));
        Ok(())
    }
}

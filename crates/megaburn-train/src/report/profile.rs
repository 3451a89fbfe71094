//! The profile of a run.

use megaburn_report::profile::{PROFILES, Summary, Trace, table, write_profile};

use super::Reporter;
use crate::error::TrainError;

impl Reporter<'_> {
    /// Writes a profile into the folder of the run, and prints its table. A profile that cannot be
    /// written is only a warning.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn profile(&mut self, trace: Trace) -> Result<(), TrainError> {
        self.folder.check()?;
        let trace = Trace {
            run_id: self.folder.id(),
            ..trace
        };
        let summary = Summary::of(&trace);
        for line in table(&summary).lines() {
            self.console.line(line);
        }
        match write_profile(&self.folder.path().join(PROFILES), &trace, &summary) {
            Ok([trace, ..]) => self.console.line(format!(
                "profile  {} opens in https://ui.perfetto.dev; the table is next to it",
                trace.display()
            )),
            Err(error) => tracing::warn!("the profile is lost: {error}"),
        }
        Ok(())
    }
}

//! Reports the health of GPUs.

use super::Reporter;
use crate::{error::TrainError, gpu_health::GpuHealthSummary};

impl Reporter<'_> {
    /// Records the health of all GPUs, and warns of what happened to one.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn gpu_health(&mut self, summary: &GpuHealthSummary) -> Result<(), TrainError> {
        if !summary.is_known() {
            return Ok(());
        }
        self.metrics.write_line(summary)?;
        for event in &summary.events {
            self.console.line(format!(
                "warning  rank {} (host {}, GPU {}): {}",
                event.rank, event.host, event.gpu, event.what
            ));
        }
        Ok(())
    }
}

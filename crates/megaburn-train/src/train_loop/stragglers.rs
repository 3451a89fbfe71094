//! Ranks that are slower than the others, and the health of their GPUs.

use super::TrainLoop;
use crate::{error::TrainError, run_trainer::RunTrainer};

impl<T: RunTrainer> TrainLoop<'_, T> {
    /// Compares the ranks' own work if step `step` ends an interval, and reports stragglers and the
    /// health of GPUs.
    ///
    /// # Errors
    /// A failed collective, or the folder no longer belongs to the run.
    /// # Collective
    /// All ranks.
    pub(super) fn name_stragglers(&mut self, step: u64) -> Result<(), TrainError> {
        let found = self.stragglers.compare(step, &self.groups.world)?;
        let health = self.gpu_health.gather(step, &self.groups.world)?;
        let Some(report) = &mut self.report else {
            return Ok(());
        };
        if let Some(health) = health {
            report.gpu_health(&health)?;
        }
        found
            .iter()
            .try_for_each(|straggler| report.straggler(step, straggler))
    }
}

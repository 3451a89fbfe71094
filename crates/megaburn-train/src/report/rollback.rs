//! Reports a return to a checkpoint after a spike.

use serde::Serialize;

use super::Reporter;
use crate::{
    error::TrainError,
    trainer_core::{Rollback, Spike},
};

/// A rollback: a line of `metrics.jsonl`, after that of the step whose loss was a spike.
#[derive(Debug, Serialize)]
struct RollbackMetrics {
    /// The step of the spike.
    rollback: u64,
    /// The step of the checkpoint that was reloaded.
    to_step: u64,
    /// The bound of a spike.
    bound: f64,
    /// The samples that are not read again: the first one, and the one after the last.
    samples: [u64; 2],
}

impl Reporter<'_> {
    /// Reports that the run continues with the weights of a checkpoint.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn rolled_back(
        &mut self,
        spike: Spike,
        rollback: Rollback,
    ) -> Result<(), TrainError> {
        let Spike { step, loss, bound } = spike;
        let Rollback {
            to_step, samples, ..
        } = rollback;
        self.metrics.write_line(&RollbackMetrics {
            rollback: step,
            to_step,
            bound,
            samples,
        })?;
        let [first, end] = samples;
        self.console.line(format!(
            "rollback the loss of step {step} is {loss:.4}, a spike (above {bound:.4}): the run \
            continues with the weights of step {to_step}, and does not read samples {first} to {} again",
            end - 1
        ));
        Ok(())
    }
}

//! Compares the ranks' state before each checkpoint, and sets one aside that may hold wrong values all
//! the same, because the memory of a rank failed.

use megaburn_collective::Phase;

use super::TrainLoop;
use crate::{error::TrainError, run_trainer::RunTrainer};

impl<T: RunTrainer> TrainLoop<'_, T> {
    /// Compares what several ranks hold copies of.
    ///
    /// # Errors
    /// Two ranks differ, or a device cannot be read.
    /// # Collective
    /// All ranks.
    pub(super) fn compare_state(&mut self) -> Result<(), TrainError> {
        self.trainer.core_mut().check_state()?;
        self.compared = self.trainer.core().progress().step;
        Ok(())
    }

    /// As [`compare_state`](Self::compare_state), if ranks compare their state at all and have not
    /// done so after this step.
    ///
    /// # Errors
    /// As [`compare_state`](Self::compare_state).
    /// # Collective
    /// All ranks.
    pub(super) fn compare_before_save(&mut self) -> Result<(), TrainError> {
        let is_compared = self.compared == self.trainer.core().progress().step;
        if self.config.train.check_replicas_interval == 0 || is_compared {
            return Ok(());
        }
        self.compare_state()
    }

    /// Sets aside the checkpoint of step `step`, the newest, because the memory of a rank may have
    /// failed before it was complete: the next start continues from an older one. The first update
    /// after the comparison finds that, so an asynchronous save or an upload of the step has only
    /// begun, and is given up.
    ///
    /// # Collective
    /// All ranks; one bit.
    pub(super) fn set_aside_suspect(&mut self, step: u64) {
        // A launcher ends the other ranks soon after the first one has failed.
        let _saving = self.groups.world.phase(Phase::Save);
        self.saves.give_up(step);
        self.stored.give_up(step);
        self.trainer.core().set_aside_suspect(step);
        if let Some(state) = &mut self.state {
            state.set_aside(step);
        }
        if let Err(error) = self.groups.world.barrier() {
            tracing::warn!("{error}: the checkpoint of step {step} may not be renamed everywhere");
        }
    }
}

#[cfg(test)]
mod tests;

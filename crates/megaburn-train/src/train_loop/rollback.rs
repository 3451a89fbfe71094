//! `train.on_spike = "rollback"`.

use std::mem;

use megaburn_collective::Phase;

use super::TrainLoop;
use crate::{config::OnSpike, error::TrainError, run_trainer::RunTrainer, trainer_core::Spike};

/// After this many rollbacks in a row to the same weights, the next one ends the run.
const MAX_ROLLBACKS: usize = 3;

impl<T: RunTrainer> TrainLoop<'_, T> {
    /// Reloads the last checkpoint if the step was a spike and `train.on_spike` asks for it. The run
    /// continues after the samples of the spike.
    ///
    /// # Errors
    /// There is no checkpoint, it cannot be read, or too many rollbacks have led to its weights.
    /// # Collective
    /// All ranks.
    pub(super) fn roll_back(&mut self) -> Result<(), TrainError> {
        let Some(spike) = self.trainer.core_mut().spike.take() else {
            return Ok(());
        };
        if self.config.train.on_spike != OnSpike::Rollback {
            return Ok(());
        }
        let written = {
            let _saving = self.groups.world.phase(Phase::Save);
            self.saves.finish(&self.trainer)?
        };
        self.record_saved(written)?;
        let refused = |why: String| {
            let Spike { step, loss, bound } = spike;
            Err(TrainError::NoRollback {
                step,
                loss,
                bound,
                why,
            })
        };
        let core = self.trainer.core_mut();
        // Nothing of the old weights may be in flight.
        core.sharding.settle();
        core.sharding.release();
        let reached = core.progress();
        // A checkpoint has the rollbacks and evaluations before it only.
        let before = mem::take(&mut core.rollbacks);
        let losses = mem::take(&mut core.eval_losses);
        if self.trainer.resume_with(&self.stored)?.is_none() {
            return refused(
                "there is no checkpoint yet: set a smaller train.checkpoint_interval, or \
                train.on_spike = \"skip\""
                    .into(),
            );
        }
        let core = self.trainer.core_mut();
        core.rollbacks = before;
        core.eval_losses = losses;
        let (rollback, num) = core.continue_from(reached);
        if num > MAX_ROLLBACKS {
            let to_step = rollback.to_step;
            return refused(format!(
                "{MAX_ROLLBACKS} rollbacks have led to the weights of step {to_step}, and a spike \
                followed each: look at the samples, and continue with a smaller optimizer.lr or from \
                an older checkpoint"
            ));
        }
        match &mut self.report {
            Some(report) => report.rolled_back(spike, rollback),
            None => Ok(()),
        }
    }
}

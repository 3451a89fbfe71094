//! Checkpoints that may hold wrong values, because the memory of a rank failed.

use std::collections::BTreeSet;

use super::TrainLoop;
use crate::{error::TrainError, run_trainer::RunTrainer};

impl<T: RunTrainer> TrainLoop<'_, T> {
    /// The steps whose checkpoints the next save does not delete: those that are being uploaded (on NFS,
    /// a file that another host deletes is gone although it is open here), and, if ranks compare their
    /// state, the newest one before the last comparison. The run can continue from that one.
    pub(super) fn steps_in_use(&mut self) -> BTreeSet<u64> {
        let mut in_use = self.stored.pending_steps();
        if self.config.train.check_replicas_interval > 0 {
            let is_sound = |step: &&u64| **step < self.compared;
            let newest = self.saved_steps.iter().filter(is_sound).max().copied();
            self.saved_steps.retain(|step| Some(*step) >= newest);
            in_use.extend(newest);
        }
        in_use
    }

    /// Sets aside the checkpoints since the last comparison, if `error` says that the memory of a rank
    /// failed: the next start continues from an older one. Copies of them in
    /// `train.checkpoint_store` are deleted, so that the right ones take their place.
    pub(super) fn set_aside_suspects(&self, error: &TrainError) {
        let Some(step) = error.first_suspect(self.compared) else {
            return;
        };
        self.trainer.core().set_aside_since(step);
        if self.groups.is_main() {
            match self.stored.delete_since(step) {
                Ok(deleted) => deleted.iter().for_each(|step| {
                    tracing::warn!("the copy of step {step} in train.checkpoint_store was deleted");
                }),
                Err(error) => tracing::warn!(
                    "train.checkpoint_store may have checkpoints with wrong values since step \
                    {step}: {error}"
                ),
            }
        }
    }
}

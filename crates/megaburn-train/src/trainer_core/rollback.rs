//! A return to the weights of a checkpoint, past the samples read since.

use burn::module::Module;
use serde::{Deserialize, Serialize};

use super::{Progress, TrainerCore};

/// A return to a checkpoint after a spike of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rollback {
    /// The step of the spike.
    pub(crate) step: u64,
    /// The step of the checkpoint.
    pub(crate) to_step: u64,
    /// The number of updates in the checkpoint.
    pub(crate) updates: u64,
    /// The samples in between, which are not read again: the first one, and the one after the last.
    pub(crate) samples: [u64; 2],
}

/// A step whose loss was a spike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spike {
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) bound: f64,
}

impl<M: Module> TrainerCore<M> {
    /// Continues with the weights of a checkpoint that was just loaded, after the samples of
    /// `reached`: the steps in between count as skipped, so that each step and each sample has one
    /// number. Returns the rollback, and how many in a row have led to the same weights.
    pub(crate) fn continue_from(&mut self, reached: Progress) -> (Rollback, usize) {
        let saved = self.progress;
        let rollback = Rollback {
            step: reached.step,
            to_step: saved.step,
            updates: saved.step - saved.skipped_steps,
            samples: [saved.consumed_samples, reached.consumed_samples],
        };
        self.progress = saved.skipping_to(reached);
        self.rollbacks.push(rollback);
        let rollbacks = self.rollbacks.iter().rev();
        let num = rollbacks
            .take_while(|before| before.updates == rollback.updates)
            .count();
        (rollback, num)
    }
}

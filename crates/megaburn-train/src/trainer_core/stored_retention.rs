use std::collections::BTreeSet;

use burn::module::Module;
use megaburn_checkpoint::Retention;

use crate::trainer_core::TrainerCore;

impl<M: Module> TrainerCore<M> {
    /// Sets the steps whose checkpoints the next save does not delete.
    pub(crate) fn set_in_use(&mut self, steps: BTreeSet<u64>) {
        self.in_use = steps;
    }

    /// Which checkpoints stay in `train.checkpoint_store`.
    pub(crate) fn stored_retention(&self) -> Retention {
        Retention {
            newest: self.config.train.keep_stored_checkpoints,
            in_use: BTreeSet::new(),
            ..self.retention()
        }
    }
}

use std::collections::BTreeSet;

use burn::module::Module;
use megaburn_checkpoint::Retention;

use crate::trainer_core::TrainerCore;

impl<M: Module> TrainerCore<M> {
    /// Sets the steps whose checkpoints the next save does not delete, because they are being
    /// uploaded: on NFS, a file that another host deletes is gone although it is open here.
    pub(crate) fn set_uploading(&mut self, steps: BTreeSet<u64>) {
        self.uploading = steps;
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

use megaburn_checkpoint::Retention;

use crate::trainer::Trainer;

impl Trainer {
    /// Which checkpoints stay in `train.checkpoint_store`.
    pub(crate) fn stored_retention(&self) -> Retention {
        Retention {
            newest: self.config.train.keep_stored_checkpoints,
            ..self.retention()
        }
    }
}

//! Where the checkpoints of a run are.

use std::path::{Path, PathBuf};

use burn::module::Module;
use megaburn_checkpoint::{Place, checkpoint_path};

use crate::{run_folder::names::CHECKPOINTS, trainer_core::TrainerCore};

impl<M: Module> TrainerCore<M> {
    /// The folder of the checkpoint of a step.
    pub(crate) fn checkpoint_path(&self, step: u64) -> PathBuf {
        checkpoint_path(self.place().dir(), step)
    }

    /// Where the checkpoints are.
    pub(crate) fn place(&self) -> Place {
        match &self.run {
            Some(run) => run.place.clone(),
            None => Place::shared(Path::new(&self.config.run.dir).join(CHECKPOINTS)),
        }
    }
}

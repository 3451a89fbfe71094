//! Determines which run wrote the checkpoint that a run finds in its folder.

use std::path::Path;

use burn::module::Module;
use megaburn_checkpoint::{
    Checkpoint, Refused, checkpoint_step, checkpoints_of, set_aside_damaged,
};

use crate::{
    error::TrainError, resume_error::ResumeError, run_folder::names::MARKER,
    trainer_core::TrainerCore,
};

impl<M: Module> TrainerCore<M> {
    /// The run that wrote the checkpoint, if it is known and not this one.
    pub(crate) fn other_run(&self, checkpoint: &Checkpoint) -> Option<String> {
        let writer = checkpoint.manifest().run_id.clone();
        writer.filter(|writer| self.run.as_ref().is_some_and(|run| run.id != *writer))
    }

    /// Refuses a checkpoint of another run in a host's folder, because the two runs would have the
    /// same folder.
    pub(crate) fn check_local_owner(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let place = self.place();
        let is_local = place.hosts().is_some() && checkpoint.path().starts_with(place.dir());
        let path = checkpoint.path().to_path_buf();
        if is_local && checkpoint.trainer().is_null() {
            let what = "has weights only, and must be in `checkpoints` of run.dir".to_string();
            return Err(ResumeError::Other { path, what }.into());
        }
        match self.other_run(checkpoint).filter(|_| is_local) {
            None => Ok(()),
            Some(writer) => {
                let marker = Path::new(&self.config.run.dir).join(MARKER);
                Err(ResumeError::OfOtherRun {
                    path,
                    writer,
                    marker,
                }
                .into())
            }
        }
    }

    /// Refuses a checkpoint that another run or a conversion wrote if this run has older ones of
    /// its own, because its own progress would be lost.
    pub(crate) fn check_own_progress(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let Some(run) = &self.run else { return Ok(()) };
        let writer = match self.other_run(checkpoint) {
            Some(other) => format!("run {other}"),
            None if checkpoint.trainer().is_null() => "a conversion".to_string(),
            None => return Ok(()),
        };
        let own = checkpoints_of(self.place().dir(), &run.id)?;
        let name = checkpoint.path().file_name().and_then(|name| name.to_str());
        let newest = name.and_then(checkpoint_step);
        match own.into_iter().find(|(step, _)| Some(*step) < newest) {
            None => Ok(()),
            Some((step, _)) => {
                let path = checkpoint.path().to_path_buf();
                Err(ResumeError::NotOwn { path, writer, step }.into())
            }
        }
    }
}

/// Renames damaged checkpoints, so that they do not count towards `train.keep_checkpoints`.
pub(crate) fn set_aside(refused: &[Refused]) {
    // A host may have nothing of a checkpoint that is incomplete on the others.
    for Refused { path, .. } in refused.iter().filter(|refused| refused.path.exists()) {
        match set_aside_damaged(path) {
            Ok(aside) => tracing::warn!("it was set aside as {}", aside.display()),
            Err(error) => tracing::warn!("it could not be renamed: {error}"),
        }
    }
}

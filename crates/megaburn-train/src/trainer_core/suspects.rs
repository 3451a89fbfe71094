//! Checkpoints that may hold wrong values, because the memory of a rank failed.

use std::path::Path;

use burn::module::Module;
use megaburn_checkpoint::{
    CheckpointState, Place, checkpoints_of, list_checkpoint, list_checkpoints, set_aside_suspect,
};

use crate::{
    error::TrainError, resume_error::ResumeError, start::settle, trainer_core::TrainerCore,
};

impl<M: Module> TrainerCore<M> {
    /// Renames the run's checkpoints from step `step` on, which may hold wrong values, so that no start
    /// continues from them.
    pub(crate) fn set_aside_since(&self, step: u64) {
        let place = self.place();
        let Some(run) = self
            .run
            .as_ref()
            .filter(|_| place.is_keeper(&self.groups.world))
        else {
            return;
        };
        let own = checkpoints_of(place.dir(), &run.id).unwrap_or_else(|error| {
            tracing::warn!("{error}: a checkpoint since step {step} may hold wrong values");
            Vec::new()
        });
        for (_, path) in own.into_iter().filter(|(of, _)| *of >= step) {
            let it = path.display();
            match set_aside_suspect(&path) {
                Ok(aside) => tracing::warn!(
                    "{it} may hold wrong values: it was set aside as {}",
                    aside.display()
                ),
                Err(error) => {
                    tracing::warn!("{it} may hold wrong values, and cannot be renamed: {error}");
                }
            }
        }
    }

    /// Fails if all checkpoints of the run may hold wrong values. Without this, it would start anew.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn check_none_suspect(&self, place: &Place) -> Result<(), TrainError> {
        let mine = match self.groups.is_main() {
            true => none_is_suspect(place.dir(), self.run.as_ref().map(|run| run.id.as_str())),
            false => Ok(()),
        };
        settle(&self.groups.world, mine)
    }
}

/// Fails if a checkpoint of a run, or of any, was set aside because it may hold wrong values; the error
/// names the newest.
pub(crate) fn none_is_suspect(dir: &Path, run_id: Option<&str>) -> Result<(), TrainError> {
    // A run that begins has no folder yet.
    if !dir.is_dir() {
        return Ok(());
    }
    let mut found = list_checkpoints(dir)?;
    found.retain(|listed| {
        let is_own = || {
            let manifest = list_checkpoint(&listed.path).manifest;
            let writer = manifest.and_then(|manifest| manifest.run_id);
            run_id.is_none() || writer.is_none() || writer.as_deref() == run_id
        };
        listed.state == CheckpointState::Suspect && is_own()
    });
    match found.pop() {
        Some(newest) => Err(ResumeError::AllSuspect { path: newest.path }.into()),
        None => Ok(()),
    }
}

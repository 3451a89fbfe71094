//! Checkpoints that may hold wrong values, because the memory of a rank failed.

use std::path::{Path, PathBuf};

use burn::module::Module;
use megaburn_checkpoint::{
    CheckpointState, Place, checkpoints_of, list_checkpoint, list_checkpoints, set_aside_suspect,
};

use crate::{
    error::TrainError, report::saved_steps, resume_error::ResumeError, start::settle,
    trainer_core::TrainerCore,
};

impl<M: Module> TrainerCore<M> {
    /// Renames the run's checkpoint of step `step`, if it has one, because it may hold wrong values. No
    /// start continues from it then.
    pub(crate) fn set_aside_suspect(&self, step: u64) {
        let place = self.place();
        let Some(run) = self
            .run
            .as_ref()
            .filter(|_| place.is_keeper(&self.groups.world))
        else {
            return;
        };
        let own = checkpoints_of(place.dir(), &run.id).unwrap_or_else(|error| {
            tracing::warn!("{error}: the checkpoint of step {step} may hold wrong values");
            Vec::new()
        });
        let Some((_, path)) = own.into_iter().find(|(of, _)| *of == step) else {
            return;
        };
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

    /// Fails if the run has no checkpoint that can be used, but has saved before. Without this, it
    /// would start anew.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn check_may_begin(&self, place: &Place) -> Result<(), TrainError> {
        let run_id = self.run.as_ref().map(|run| run.id.as_str());
        let run = Path::new(&self.config.run.dir);
        let check = || match check_suspects(place.dir(), run, run_id)? {
            Some(suspect) => {
                tracing::warn!(
                    "`{}` is the first checkpoint of the run and may hold wrong values: the run \
                    starts again at step 1",
                    suspect.display()
                );
                Ok(())
            }
            None => self.check_never_saved(place),
        };
        let mine = if self.groups.is_main() {
            check()
        } else {
            Ok(())
        };
        settle(&self.groups.world, mine)
    }
}

/// Finds the checkpoint in `dir` that was set aside because it may hold wrong values, of a run or of
/// any. `run` is the folder of the run, which has no other checkpoint.
///
/// # Errors
/// The run has saved an earlier one, which is lost: it could have continued from that.
pub(crate) fn check_suspects(
    dir: &Path,
    run: &Path,
    run_id: Option<&str>,
) -> Result<Option<PathBuf>, TrainError> {
    // A run that begins has no folder yet.
    if !dir.is_dir() {
        return Ok(None);
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
    let earliest = found.first().and_then(|listed| listed.step);
    let has_earlier = saved_steps(run).any(|saved| earliest.is_some_and(|step| saved < step));
    match found.pop() {
        Some(newest) if has_earlier => Err(ResumeError::AllSuspect { path: newest.path }.into()),
        newest => Ok(newest.map(|newest| newest.path)),
    }
}

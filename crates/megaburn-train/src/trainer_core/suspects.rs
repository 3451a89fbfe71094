//! Checkpoints that may hold wrong values, because the memory of a rank failed.

use std::path::{Path, PathBuf};

use burn::module::Module;
use megaburn_checkpoint::{
    CheckpointState, Place, checkpoints_of, list_checkpoint, list_checkpoints, set_aside_suspect,
};
use megaburn_collective::objects;

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

    /// Checks that a run without a checkpoint to continue from may start anew.
    ///
    /// # Errors
    /// Only suspect checkpoints are left of the run and others are lost; the last start saved to other
    /// folders of the hosts; a folder cannot be read.
    /// # Collective
    /// All ranks; the names of suspect checkpoints go to rank 0.
    pub(crate) fn check_may_begin(&self, place: &Place) -> Result<(), TrainError> {
        let world = &self.groups.world;
        let run_id = self.run.as_ref().map(|run| run.id.as_str());
        let mine = match place.is_keeper(world) {
            true => suspects_of(place.dir(), run_id),
            false => Ok(Vec::new()),
        };
        let all = objects::gather(world, &settle(world, mine)?)?;
        let check = || match first_suspect(all.concat(), Path::new(&self.config.run.dir))? {
            // A rollback after a spike looks here, too; it is not a start.
            Some(_) if self.progress.step > 0 => Ok(()),
            Some(suspect) => {
                tracing::warn!("{}", starts_again(&suspect));
                Ok(())
            }
            None => self.check_never_saved(place),
        };
        let mine = if self.groups.is_main() {
            check()
        } else {
            Ok(())
        };
        settle(world, mine)
    }
}

/// The line of a start after the first checkpoint of a run was set aside.
pub(crate) fn starts_again(suspect: &Path) -> String {
    format!(
        "`{}` is the first checkpoint of the run and may hold wrong values: the run starts again at \
        step 1",
        suspect.display()
    )
}

/// Returns the suspect checkpoints in `dir` with their steps. With a `run_id`, other runs' are left out.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn suspects_of(
    dir: &Path,
    run_id: Option<&str>,
) -> Result<Vec<(u64, PathBuf)>, TrainError> {
    // A run that begins has no folder yet.
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let is_own = |path: &Path| {
        let manifest = list_checkpoint(path).manifest;
        let writer = manifest.and_then(|manifest| manifest.run_id);
        run_id.is_none() || writer.is_none() || writer.as_deref() == run_id
    };
    let found = list_checkpoints(dir)?.into_iter();
    let suspect = found
        .filter(|listed| listed.state == CheckpointState::Suspect && is_own(&listed.path))
        .filter_map(|listed| Some((listed.step?, listed.path)));
    Ok(suspect.collect())
}

/// The newest of the suspect checkpoints of the run in the folder `run`, which has no other one.
///
/// # Errors
/// The run has saved others, which are lost: it could have continued from them.
pub(crate) fn first_suspect(
    suspects: Vec<(u64, PathBuf)>,
    run: &Path,
) -> Result<Option<PathBuf>, TrainError> {
    let is_suspect = |saved: u64| suspects.iter().any(|(step, _)| *step == saved);
    let has_lost = saved_steps(run).any(|saved| !is_suspect(saved));
    match suspects.into_iter().max() {
        Some((_, path)) if has_lost => Err(ResumeError::OnlySuspect { path }.into()),
        newest => Ok(newest.map(|(_, path)| path)),
    }
}

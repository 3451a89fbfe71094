use burn::module::Module;
use megaburn_checkpoint::{Background, checkpoints_of};
use megaburn_collective::Progress;

use crate::trainer_core::TrainerCore;

/// The name of the thread that removes what was set aside.
const NAME: &str = "discard-set-aside";

impl<M: Module> TrainerCore<M> {
    /// Starts to remove what `--fresh` set aside when the run began. It is called when the run has
    /// committed a checkpoint. There may be many large files, so a thread of rank 0 removes them. It
    /// stops when the trainer is dropped; the next start removes the rest.
    pub(crate) fn discard_set_aside(&self) {
        let folder = self.run.as_ref().and_then(|run| run.folder.clone());
        let Some(folder) = folder.filter(|folder| !folder.set_aside().is_empty()) else {
            return;
        };
        let mut discarding = self.discarding.borrow_mut();
        if discarding.as_ref().is_some_and(|work| !work.is_done()) {
            return;
        }
        let started = Background::start(NAME, move |is_cancelled, progress| {
            folder.discard_set_aside(is_cancelled, progress);
        });
        match started {
            Ok(work) => *discarding = Some(work),
            Err(error) => tracing::warn!(
                "the previous run is not removed: {error}; this is tried again after the next \
                checkpoint"
            ),
        }
    }

    /// As [`discard_set_aside`](Self::discard_set_aside), at a start, if this run has written a
    /// checkpoint before.
    pub(crate) fn continue_discarding(&self) {
        let Some(run) = &self.run else { return };
        let own = checkpoints_of(self.place().dir(), &run.id);
        if own.is_ok_and(|own| !own.is_empty()) {
            self.discard_set_aside();
        }
    }

    /// Waits until what `--fresh` set aside is removed, if that has begun.
    pub(crate) fn finish_discarding(&self, progress: &Progress) {
        let work = self.discarding.borrow_mut().take();
        if let Some(Err(error)) = work.map(|work| work.wait(progress)) {
            tracing::warn!("the previous run is not removed: {error}; the next start removes it");
        }
    }
}

use megaburn_checkpoint::Background;
use megaburn_collective::Progress;

use crate::trainer::Trainer;

/// The name of the thread that removes what was set aside.
const NAME: &str = "set-aside-removal";

impl Trainer {
    /// Starts to remove what `--fresh` set aside when the run began. It is called when the run has a
    /// checkpoint. There may be many large files, so a thread of rank 0 removes them; it stops when
    /// the trainer is dropped, and the next start removes the rest.
    pub(crate) fn discard_set_aside(&self) {
        let folder = self.run.as_ref().and_then(|run| run.folder.clone());
        let Some(folder) = folder.filter(|folder| !folder.set_aside().is_empty()) else {
            return;
        };
        if self.set_aside_removal.get().is_some() {
            return;
        }
        let started = Background::start(NAME, move |is_cancelled, progress| {
            folder.discard_set_aside(is_cancelled, progress);
        });
        match started {
            Ok(removal) => {
                self.set_aside_removal.get_or_init(|| removal);
            }
            Err(error) => tracing::warn!(
                "the previous run is not removed: {error}; the next start removes it"
            ),
        }
    }

    /// Waits until what `--fresh` set aside is removed, if the removal has begun.
    pub(crate) fn finish_discarding(&mut self, progress: &Progress) {
        if let Some(removal) = self.set_aside_removal.take()
            && let Err(error) = removal.wait(progress)
        {
            tracing::warn!("the previous run is not removed: {error}; the next start removes it");
        }
    }
}

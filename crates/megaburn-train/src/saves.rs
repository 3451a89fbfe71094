//! The checkpoints of a run: when they are saved, and the one that is being written.

use std::time::{Duration, Instant};

use megaburn_checkpoint::{Advance, AsyncSave, CheckpointError};
use megaburn_collective::objects;

use crate::{config::TrainingConfig, error::TrainError, run_trainer::RunTrainer};

/// The checkpoints of a run.
#[derive(Debug)]
pub(crate) struct Saves {
    /// The step of the newest checkpoint.
    newest: Option<u64>,
    /// The checkpoint that the ranks' threads are writing.
    pending: Option<PendingSave>,
    /// The time of the last save, or of the start.
    last: Instant,
    /// Whether the last asynchronous save failed.
    has_failed: bool,
}

/// A checkpoint in progress.
#[derive(Debug)]
struct PendingSave {
    save: AsyncSave,
    begun: Instant,
    /// How long training has waited for it.
    waited: Duration,
    /// Whether it is complete, and only older ones remain to be deleted.
    is_committed: bool,
}

impl PendingSave {
    /// The checkpoint, if it is complete now.
    fn saved(&self) -> SavedCheckpoint {
        SavedCheckpoint {
            step: self.save.step(),
            seconds: self.begun.elapsed(),
            waited: self.waited,
        }
    }
}

/// A checkpoint that was saved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedCheckpoint {
    pub(crate) step: u64,
    /// From its start until it was complete.
    pub(crate) seconds: Duration,
    /// How long training waited for it.
    pub(crate) waited: Duration,
}

impl Saves {
    /// `newest` is the step of the checkpoint that the run starts from, if any.
    pub(crate) fn new(newest: Option<u64>) -> Self {
        Self {
            newest,
            pending: None,
            last: Instant::now(),
            has_failed: false,
        }
    }

    /// Whether the next save at an interval may be asynchronous. After a failed one, training waits
    /// for the next, so that a run whose checkpoints cannot be written ends.
    pub(crate) fn may_be_async(&self) -> bool {
        !self.has_failed
    }

    /// Whether the newest checkpoint is that of this step.
    pub(crate) fn has(&self, step: u64) -> bool {
        self.newest == Some(step)
    }

    /// Whether a checkpoint is due after the step that was just done.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks; a bit from rank 0 with `train.checkpoint_interval_minutes`.
    pub(crate) fn is_due(
        &self,
        train: &TrainingConfig,
        trainer: &impl RunTrainer,
    ) -> Result<bool, TrainError> {
        let step = trainer.core().progress().step;
        let interval = train.checkpoint_interval;
        if interval > 0 && step.is_multiple_of(interval) {
            return Ok(true);
        }
        let minutes = train.checkpoint_interval_minutes;
        if minutes == 0.0 {
            return Ok(false);
        }
        // The ranks' clocks differ, so rank 0 decides.
        let is_due = self.last.elapsed() >= Duration::from_secs_f64(minutes * 60.0);
        Ok(objects::broadcast(trainer.core().world(), &is_due)?)
    }

    /// Saves the current state and waits until it is on disk.
    ///
    /// # Errors
    /// The checkpoint cannot be saved.
    /// # Collective
    /// All ranks.
    pub(crate) fn save(
        &mut self,
        trainer: &impl RunTrainer,
    ) -> Result<SavedCheckpoint, TrainError> {
        let begun = Instant::now();
        trainer.core().save(trainer.record())?;
        let step = trainer.core().progress().step;
        self.newest = Some(step);
        self.has_failed = false;
        self.last = Instant::now();
        let seconds = begun.elapsed();
        Ok(SavedCheckpoint {
            step,
            seconds,
            waited: seconds,
        })
    }

    /// Starts to save the current state asynchronously. No other save may be pending. If this fails,
    /// training continues without the checkpoint, after a warning.
    ///
    /// # Errors
    /// A rank is gone, another run has taken the folder, or weights are not finite.
    /// # Collective
    /// All ranks.
    pub(crate) fn begin(&mut self, trainer: &mut impl RunTrainer) -> Result<(), TrainError> {
        let begun = Instant::now();
        let record = trainer.record();
        let save = trainer.core_mut().begin_save(record);
        let save = self.unless_lost(trainer, save)?;
        self.pending = save.map(|save| PendingSave {
            save,
            begun,
            waited: begun.elapsed(),
            is_committed: false,
        });
        self.last = Instant::now();
        Ok(())
    }

    /// Continues with the pending checkpoint as far as the ranks' threads have come. Returns it once
    /// it is complete.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    /// # Collective
    /// All ranks; nothing is sent if no checkpoint is pending.
    pub(crate) fn advance(
        &mut self,
        trainer: &impl RunTrainer,
    ) -> Result<Option<SavedCheckpoint>, TrainError> {
        let Some(mut pending) = self.pending.take() else {
            return Ok(None);
        };
        let asked = Instant::now();
        let advance = trainer.core().advance_save(&mut pending.save);
        let Some(advance) = self.unless_lost(trainer, advance)? else {
            return Ok(None);
        };
        pending.waited += asked.elapsed();
        let saved = matches!(advance, Advance::Committed(_)).then(|| pending.saved());
        self.newest = saved.map(|saved| saved.step).or(self.newest);
        pending.is_committed |= saved.is_some();
        self.pending = Some(pending).filter(|_| advance != Advance::Done);
        Ok(saved)
    }

    /// Waits for the pending checkpoint, if any. Returns it unless [`advance`](Self::advance) has.
    /// If it cannot be completed, training continues without it, after a warning.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    /// # Collective
    /// All ranks.
    pub(crate) fn finish(
        &mut self,
        trainer: &impl RunTrainer,
    ) -> Result<Option<SavedCheckpoint>, TrainError> {
        let Some(pending) = self.pending.take() else {
            return Ok(None);
        };
        let mut saved = pending.saved();
        let is_known = pending.is_committed;
        let asked = Instant::now();
        let begun = pending.begun;
        let finished = trainer.core().finish_save(pending.save);
        if self.unless_lost(trainer, finished)?.is_none() || is_known {
            return Ok(None);
        }
        self.newest = Some(saved.step);
        saved.waited += asked.elapsed();
        saved.seconds = begun.elapsed();
        Ok(Some(saved))
    }

    /// Gives up the checkpoint of step `step` if it is being written; nothing of it remains.
    pub(crate) fn give_up(&mut self, step: u64) {
        self.pending.take_if(|pending| pending.save.step() == step);
    }

    /// Turns the failure of one checkpoint into a warning.
    fn unless_lost<T>(
        &mut self,
        trainer: &impl RunTrainer,
        saved: Result<T, TrainError>,
    ) -> Result<Option<T>, TrainError> {
        let error = match saved {
            Ok(saved) => return Ok(Some(saved)),
            Err(error) => error,
        };
        let may_continue = |error: &CheckpointError| {
            !error.is_not_finite() && !matches!(error, CheckpointError::Collective(_))
        };
        let is_lost = matches!(&error, TrainError::Save { source, .. } if may_continue(source));
        if !is_lost {
            return Err(error);
        }
        trainer.core().check_folder()?;
        self.has_failed = true;
        if trainer.core().world().rank() == 0 {
            match self.newest {
                Some(step) => tracing::warn!(
                    "{error}; training continues, and the newest checkpoint is that of step {step}"
                ),
                None => {
                    tracing::warn!("{error}; training continues, and there is no older checkpoint")
                }
            }
        }
        Ok(None)
    }
}

//! Writes checkpoints of what a trainer holds.

use std::{rc::Rc, sync::Arc};

use burn::module::Module;
use megaburn_checkpoint::{
    Advance, AsyncSave, CheckpointError, Guard, Retention, SharedGuard, Snapshot, save,
};
use megaburn_collective::Phase;
use serde_json::Value;

use super::TrainerCore;
use crate::{error::TrainError, run_folder::RunShare, start::settle};

/// What a checkpoint records in addition to tensors.
#[derive(Debug)]
pub(crate) struct Record {
    /// The model.
    pub(crate) model: Value,
    /// The state of the trainer.
    pub(crate) trainer: Value,
}

impl<M: Module> TrainerCore<M> {
    /// Writes a checkpoint of the current state into the folder of checkpoints, or into that of each
    /// host.
    ///
    /// # Errors
    /// Weights are not finite; any rank fails (the error is on every rank); another run has taken
    /// the folder. Older checkpoints are untouched.
    /// # Collective
    /// All ranks.
    pub(crate) fn save(&self, record: Record) -> Result<(), TrainError> {
        let _phase = self.groups.world.phase(Phase::Save);
        self.check_finite()?;
        let snapshot = self.snapshot(record);
        let tensors = self.held_tensors(|held, name, range| {
            Ok(Box::new(move || {
                held.read(range).map_err(source_error(&name))
            }))
        });
        let still_ours = || self.still_ours();
        let saved = save(
            self.place(),
            &self.retention(),
            self.guard(&still_ours),
            &self.groups,
            &snapshot,
            tensors,
        );
        saved.map_err(|error| save_error(snapshot.step, error))?;
        self.discard_set_aside();
        Ok(())
    }

    /// Starts to save the current state asynchronously.
    ///
    /// # Errors
    /// Any rank fails (the error is on every rank); another run has taken the folder.
    /// # Collective
    /// All ranks.
    pub(crate) fn begin_save(&mut self, record: Record) -> Result<AsyncSave, TrainError> {
        let _phase = self.groups.world.phase(Phase::Save);
        let snapshot = self.snapshot(record);
        let step = snapshot.step;
        let in_flight = Rc::default();
        let tensors = self.held_tensors(|held, name, range| {
            let copied = held.copy_to_host(range, &in_flight);
            let part = copied.map_err(source_error(&name))?;
            Ok(Box::new(move || {
                let error = source_error(&name);
                part.read().map_err(|failed| error(failed.to_string()))
            }))
        });
        let tensors = tensors.map(|tensor| {
            let is_weight = tensor.name.starts_with("model.");
            tensor.with_must_be_finite(is_weight)
        });
        let run = self.run.clone();
        let begun = AsyncSave::begin(
            self.place(),
            &self.retention(),
            run.map(|run| Arc::new(move || run.check()) as SharedGuard),
            &self.groups,
            snapshot,
            tensors,
        );
        let begun = begun.map_err(|error| save_error(step, error))?;
        self.copies_in_flight = in_flight.take();
        Ok(begun)
    }

    /// Begins the next stage of an asynchronous save, if the threads of all ranks have ended.
    ///
    /// # Errors
    /// As [`save`](Self::save). The save is over then.
    /// # Collective
    /// All ranks.
    pub(crate) fn advance_save(&self, save: &mut AsyncSave) -> Result<Advance, TrainError> {
        let _phase = self.groups.world.phase(Phase::Save);
        let advance = save.advance(&self.groups);
        let advance = advance.map_err(|error| save_error(save.step(), error))?;
        if let Advance::Committed(_) = advance {
            self.discard_set_aside();
        }
        Ok(advance)
    }

    /// Waits until an asynchronous save is complete.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    /// # Collective
    /// All ranks.
    pub(crate) fn finish_save(&self, save: AsyncSave) -> Result<(), TrainError> {
        let _phase = self.groups.world.phase(Phase::Save);
        let step = save.step();
        let finished = save.finish(&self.groups);
        finished.map_err(|error| save_error(step, error))?;
        self.discard_set_aside();
        Ok(())
    }

    /// Fails if another run has taken the folder of the run, on every rank.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn check_folder(&self) -> Result<(), TrainError> {
        let mine = self.still_ours().map_err(|why| {
            let path = self.place().dir().to_path_buf();
            let error = CheckpointError::Guarded { path, why };
            save_error(self.progress.step, error)
        });
        settle(&self.groups.world, mine)
    }

    fn still_ours(&self) -> Result<(), String> {
        self.run.as_ref().map_or(Ok(()), RunShare::check)
    }

    /// A run that has no folder of its own saves anywhere.
    fn guard<'a>(&self, still_ours: Guard<'a>) -> Option<Guard<'a>> {
        self.run.is_some().then_some(still_ours)
    }

    pub(crate) fn retention(&self) -> Retention {
        let train = &self.config.train;
        Retention {
            newest: train.keep_checkpoints,
            every: train.keep_checkpoints_every,
            best: train.keep_best_checkpoints,
            losses: self.eval_losses.clone(),
            in_use: self.uploading.clone(),
        }
    }

    /// The contents of a checkpoint other than tensors.
    ///
    /// # Collective
    /// All ranks; nothing is sent.
    fn snapshot(&self, record: Record) -> Snapshot {
        self.sharding.settle();
        self.sharding.release();
        Snapshot {
            run_id: self.run.as_ref().map(|run| run.id.clone()),
            step: self.progress.step,
            model: record.model,
            trainer: record.trainer,
        }
    }
}

fn source_error(name: &str) -> impl FnOnce(String) -> CheckpointError + use<> {
    let name = name.to_string();
    move |why| CheckpointError::Source { name, why }
}

fn save_error(step: u64, error: CheckpointError) -> TrainError {
    TrainError::Save {
        step,
        source: Box::new(error),
    }
}

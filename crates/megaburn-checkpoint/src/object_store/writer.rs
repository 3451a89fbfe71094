//! The start of a run that writes to a store.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
};

use megaburn_collective::{Group, objects};

use super::{
    file_names::{is_written, mark_of, start_of},
    store::CheckpointStore,
    stored::StoredCheckpoint,
};
use crate::{agree::settle, error::CheckpointError, folder::step_name};

/// The most bytes of the object that names a start.
const MAX_START: u64 = 1 << 10;

/// One start of a run, which uploads checkpoints to a store and deletes old ones.
///
/// A job that lost its connection to the scheduler may still upload when its run is started again
/// elsewhere. So each start has a random token, and an object next to the checkpoints holds the
/// token of the newest start. A start reads it before it begins, completes or deletes a checkpoint, and stops
/// if the token is not its own.
#[derive(Clone, Debug)]
pub struct StoreWriter {
    store: CheckpointStore,
    run_id: String,
    start: String,
}

impl StoreWriter {
    /// Begins a start of the run `run_id`: takes over from earlier starts, and removes what their
    /// killed or failed uploads and deletions have left, except for objects that megaburn did not
    /// write. What cannot be removed is a warning.
    ///
    /// # Errors
    /// The store cannot be listed or written, or another start has taken over since.
    /// # Collective
    /// All ranks of `world`; a few bytes.
    pub fn begin(
        store: &CheckpointStore,
        run_id: &str,
        world: &Group,
    ) -> Result<Self, CheckpointError> {
        let of_start = |start: String| Self {
            store: store.clone(),
            run_id: run_id.to_owned(),
            start,
        };
        let begin = || {
            let random = RandomState::new().build_hasher().finish();
            let writer = of_start(format!("{random:016x}"));
            let text = writer.start.as_bytes();
            store.folder.put(&start_of(run_id), text)?;
            writer.remove_leftovers(&store.list()?)?;
            Ok(writer.start)
        };
        let start = settle(world, (world.rank() == 0).then(begin).transpose())?;
        let start: Option<String> = objects::broadcast(world, &start)?;
        Ok(of_start(start.unwrap_or_default()))
    }

    /// The store.
    pub fn store(&self) -> &CheckpointStore {
        &self.store
    }

    /// Checks that no other start of the run has taken over.
    pub(crate) fn check_start(&self) -> Result<(), CheckpointError> {
        let found = self.store.folder.read(&start_of(&self.run_id), MAX_START)?;
        match found == self.start.as_bytes() {
            true => Ok(()),
            false => Err(self.taken_over()),
        }
    }

    /// Checks that this start has marked the folder of a checkpoint, and no other run has.
    pub(crate) fn check_mark(&self, stored: &StoredCheckpoint) -> Result<(), CheckpointError> {
        self.check_run(stored)?;
        let mark = mark_of(&self.run_id, &self.start);
        let own = stored.object(&mark).map(drop);
        own.ok_or_else(|| self.taken_over())
    }

    fn taken_over(&self) -> CheckpointError {
        CheckpointError::StoreTakenOver {
            url: self.store.url().into(),
            run_id: self.run_id.clone(),
        }
    }

    /// Checks that no other run has marked the folder of a checkpoint.
    pub(crate) fn check_run(&self, stored: &StoredCheckpoint) -> Result<(), CheckpointError> {
        let mut marks = stored.marks();
        match marks.find(|id| *id != self.run_id) {
            None => Ok(()),
            Some(other) => Err(CheckpointError::StoreOfOtherRun {
                url: self.store.url_of(stored.step),
                found: other.into(),
                own: self.run_id.clone(),
            }),
        }
    }

    /// Checks that the run may write a checkpoint in place of `found`.
    pub(crate) fn check_own(&self, found: &StoredCheckpoint) -> Result<(), CheckpointError> {
        self.check_run(found)?;
        let mut names = found.objects.iter().map(|object| &object.name);
        match names.find(|name| is_written(name) && !self.is_own(found)) {
            None => Ok(()),
            Some(name) => Err(CheckpointError::StoreTaken {
                url: self.store.url_of(found.step),
                name: name.clone(),
            }),
        }
    }

    /// Whether only this run has marked the folder of a checkpoint.
    pub(crate) fn is_own(&self, stored: &StoredCheckpoint) -> bool {
        stored.is_of(&self.run_id)
    }

    /// Marks the folder of a step.
    pub(crate) fn mark(&self, step: u64) -> Result<(), CheckpointError> {
        let mark = mark_of(&self.run_id, &self.start);
        let text = format!("The run {} of megaburn writes this folder.\n", self.run_id);
        let name = format!("{}/{mark}", step_name(step));
        Ok(self.store.folder.put(&name, text.as_bytes())?)
    }

    /// Removes what killed or failed uploads and deletions of the run have left. What cannot be
    /// removed is a warning, because it is no obstacle to other steps.
    pub(crate) fn remove_leftovers<'a>(
        &self,
        all: impl IntoIterator<Item = &'a StoredCheckpoint>,
    ) -> Result<(), CheckpointError> {
        for stored in all {
            if stored.is_complete() || !self.is_own(stored) {
                continue;
            }
            match self.delete(stored) {
                Err(error @ CheckpointError::StoreTakenOver { .. }) => return Err(error),
                Err(error) => tracing::warn!(
                    "what a killed upload has left in {} was not removed: {error}",
                    self.store.url_of(stored.step)
                ),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Deletes a checkpoint of the run: first the manifest, last the mark.
    pub(crate) fn delete(&self, stored: &StoredCheckpoint) -> Result<(), CheckpointError> {
        self.check_start()?;
        let folder = step_name(stored.step);
        for name in stored.deleted(&self.run_id) {
            self.store.folder.delete(&format!("{folder}/{name}"))?;
        }
        Ok(())
    }
}

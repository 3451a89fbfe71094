//! The checkpoints of a run in an object store (`train.checkpoint_store`): what a start finds there,
//! and the uploads during training.

mod found;
mod uploads;

use std::{collections::BTreeSet, path::Path};

use burn::module::Module;
use megaburn_checkpoint::{CheckpointStore, Latest, Place, StoreWriter};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_store::StoreConfig;

use crate::{
    config::TrainConfig, error::TrainError, run_folder::RunShare, start::settle,
    trainer_core::TrainerCore,
};

use found::Found;
pub(crate) use uploads::UploadedCheckpoint;
use uploads::{Uploader, Uploads};

/// The checkpoints of a run in an object store, if it has one.
#[derive(Debug)]
pub(crate) struct StoredCheckpoints(Option<RunStore>);

#[derive(Debug)]
struct RunStore {
    store: CheckpointStore,
    /// What uploads need, once the run is known.
    uploader: Option<Uploader>,
    found: Found,
    uploads: Uploads,
}

/// Checks that the URL of the store can be used. Nothing is requested.
///
/// # Errors
/// The URL or its settings cannot be used, or the build has no object stores.
pub(crate) fn check_url(config: &TrainConfig) -> Result<(), TrainError> {
    open(config).map(drop)
}

fn open(config: &TrainConfig) -> Result<Option<CheckpointStore>, TrainError> {
    let url = &config.train.checkpoint_store;
    if url.is_empty() {
        return Ok(None);
    }
    let store = StoreConfig::new().on_retry(|retry| tracing::warn!("{retry}"));
    Ok(Some(CheckpointStore::open(url, &store)?))
}

impl StoredCheckpoints {
    /// No store.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Looks at the store of a run. Nothing is written.
    ///
    /// # Errors
    /// The store cannot be used; it holds checkpoints of another run, and this one has begun in
    /// `run.dir` or is to begin anew.
    /// # Collective
    /// All ranks of `world`.
    pub(crate) fn open(
        world: &Group,
        config: &TrainConfig,
        run_id: &str,
        fresh: bool,
    ) -> Result<Self, TrainError> {
        let Some(store) = settle(world, open(config))? else {
            return Ok(Self::none());
        };
        let dir = Path::new(&config.run.dir);
        let found = Found::look(world, &store, dir, run_id, fresh)?;
        Ok(Self(Some(RunStore {
            store,
            uploader: None,
            found,
            uploads: Uploads::default(),
        })))
    }

    /// The run in the store that a run in an empty folder continues.
    pub(crate) fn continued_run(&self) -> Option<&str> {
        self.0.as_ref()?.found.continued_run.as_deref()
    }

    /// Takes over the store for this start of the run, and removes what killed uploads have left.
    ///
    /// # Errors
    /// The store cannot be listed or written, or another start has taken over since.
    /// # Collective
    /// All ranks of `world`; nothing is sent if the run has no store.
    pub(crate) fn take_over(&mut self, world: &Group, share: &RunShare) -> Result<(), TrainError> {
        if let Some(run) = &mut self.0 {
            let writer = StoreWriter::begin(&run.store, &share.id, world)?;
            let share = share.clone();
            run.uploader = Some(Uploader { writer, share });
        }
        Ok(())
    }

    /// Whether the store has a complete checkpoint that is newer than the newest intact one.
    pub(crate) fn has_newer(&self, latest: &Latest) -> bool {
        let found = self.0.as_ref().map(|run| &run.found);
        found.is_some_and(|found| found.newer(latest).next().is_some())
    }

    /// Copies the newest checkpoint in the store to `place`, if it is newer than the newest intact one
    /// there. A damaged one is left out.
    ///
    /// # Errors
    /// A checkpoint cannot be copied; all in the store are damaged, and there is no other.
    /// # Collective
    /// All ranks.
    pub(crate) fn fetch(
        &self,
        latest: &Latest,
        place: &Place,
        groups: &ProcessGroups,
    ) -> Result<(), TrainError> {
        match &self.0 {
            Some(run) => run.found.fetch(&run.store, latest, place, groups),
            None => Ok(()),
        }
    }

    /// Starts to upload the checkpoint that the trainer has resumed from, unless the store has it.
    ///
    /// # Errors
    /// A rank is gone, or another run or start has taken over.
    /// # Collective
    /// All ranks.
    pub(crate) fn add_missing(
        &mut self,
        trainer: &TrainerCore<impl Module>,
        groups: &ProcessGroups,
    ) -> Result<(), TrainError> {
        let step = trainer.progress().step;
        match &self.0 {
            Some(run) if !run.found.has(step) => self.add(step, trainer, groups),
            _ => Ok(()),
        }
    }

    /// Uploads the checkpoint of a step, as soon as no other is being uploaded. If one waits for
    /// that already, this one takes its place.
    ///
    /// # Errors
    /// A rank is gone, or another run or start has taken over.
    /// # Collective
    /// All ranks.
    pub(crate) fn add(
        &mut self,
        step: u64,
        trainer: &TrainerCore<impl Module>,
        groups: &ProcessGroups,
    ) -> Result<(), TrainError> {
        let Some((uploads, uploader)) = self.uploads() else {
            return Ok(());
        };
        let path = trainer.checkpoint_path(step);
        uploads.add(step, &path, trainer.stored_retention(), groups);
        uploads.begin_next(uploader, groups)
    }

    fn uploads(&mut self) -> Option<(&mut Uploads, &Uploader)> {
        let run = self.0.as_mut()?;
        Some((&mut run.uploads, run.uploader.as_ref()?))
    }

    /// The steps of the checkpoints that are being uploaded, or wait for that.
    pub(crate) fn pending_steps(&self) -> BTreeSet<u64> {
        let run = self.0.as_ref();
        run.map(|run| run.uploads.pending_steps())
            .unwrap_or_default()
    }

    /// Whether a checkpoint is being uploaded, or waits for that.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.as_ref().is_some_and(|run| run.uploads.is_pending())
    }

    /// Continues with the upload as far as the ranks' threads have come. Returns the checkpoint once
    /// it is complete. A failure is a warning.
    ///
    /// # Errors
    /// A rank is gone, or another run or start has taken over.
    /// # Collective
    /// All ranks; nothing is sent if no upload is pending.
    pub(crate) fn advance(
        &mut self,
        groups: &ProcessGroups,
    ) -> Result<Option<UploadedCheckpoint>, TrainError> {
        let Some((uploads, uploader)) = self.uploads() else {
            return Ok(None);
        };
        let uploaded = uploads.advance(uploader, groups)?;
        uploads.begin_next(uploader, groups)?;
        Ok(uploaded)
    }

    /// Fails if the last upload did, which was a warning.
    ///
    /// # Errors
    /// Why it failed.
    pub(crate) fn check_last(&mut self) -> Result<(), TrainError> {
        let run = self.0.as_mut();
        run.map_or(Ok(()), |run| run.uploads.check_last())
    }

    /// Gives up the upload of step `step`, if it waits or has begun. The next upload of that step
    /// replaces what it has left.
    pub(crate) fn give_up(&mut self, step: u64) {
        if let Some(run) = &mut self.0 {
            run.uploads.give_up(step);
        }
    }

    /// Waits for one upload, which [`is_pending`](Self::is_pending). Its failure is a warning if
    /// another waits, and else an error.
    ///
    /// # Errors
    /// The last upload fails, or a rank is gone.
    /// # Collective
    /// All ranks.
    pub(crate) fn finish_one(
        &mut self,
        groups: &ProcessGroups,
    ) -> Result<Option<UploadedCheckpoint>, TrainError> {
        let Some((uploads, uploader)) = self.uploads() else {
            return Ok(None);
        };
        let uploaded = uploads.finish_one(uploader, groups)?;
        uploads.begin_next(uploader, groups)?;
        Ok(uploaded)
    }
}

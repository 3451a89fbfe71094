//! Uploads a checkpoint while the program keeps computing.

use std::{fs::File, mem, sync::Arc, sync::atomic::AtomicBool, sync::atomic::Ordering};

use burn::tensor::TensorData;
use megaburn_collective::{Phase, ProcessGroups, Progress, ReduceOp, objects};
use megaburn_store::Transfer;

use super::{
    file_names::mark_of,
    opened::{OpenedCheckpoint, OpenedManifest},
    store::{CheckpointStore, first_fault},
};
use crate::{
    agree::settle,
    background::Background,
    error::CheckpointError,
    folder::step_name,
    manifest::{MANIFEST, MANIFEST_HASH},
    retention::Retention,
};

/// A checkpoint that threads of the ranks are uploading.
///
/// | stage | work of the threads |
/// |---|---|
/// | claim | rank 0 removes leftovers of the run and an older checkpoint of the same step, and writes the mark |
/// | files | each rank uploads its files |
/// | finish | rank 0 compares the sizes of the objects, uploads the manifest, and deletes the checkpoints that are not kept |
///
/// [`advance`](Self::advance) asks whether all threads have ended, and begins the next stage if so.
/// If the value is dropped, the threads stop and their uploads are aborted; the next upload of the
/// run removes what is there.
#[derive(Debug)]
pub struct CheckpointUpload {
    work: Arc<Work>,
    stage: Stage,
}

/// What the stages work on.
#[derive(Debug)]
struct Work {
    store: CheckpointStore,
    step: u64,
    run_id: String,
    retention: Retention,
    opened: OpenedCheckpoint,
}

/// What [`CheckpointUpload::advance`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadStage {
    /// Some thread is at work.
    Pending,
    /// Another stage has begun.
    Continued,
    /// The checkpoint is complete. On rank 0, with the bytes of its files.
    Done(u64),
}

#[derive(Debug)]
enum Stage {
    /// Only rank 0 works.
    Claim(Option<Background<Result<(), CheckpointError>>>),
    Files(Background<Result<u64, CheckpointError>>),
    /// Only rank 0 works. It returns the bytes of its own objects.
    Finish(Option<Background<Result<u64, CheckpointError>>>, u64),
    Done(u64),
}

impl CheckpointUpload {
    /// Starts to upload a checkpoint of the run `run_id`, of which each rank has opened its files.
    ///
    /// # Errors
    /// Any rank has failed to open its files, or cannot start a thread.
    /// # Collective
    /// All ranks of `groups.world`; a few messages.
    pub fn begin(
        store: &CheckpointStore,
        step: u64,
        run_id: &str,
        retention: Retention,
        opened: Result<OpenedCheckpoint, CheckpointError>,
        groups: &ProcessGroups,
    ) -> Result<Self, CheckpointError> {
        let work = Arc::new(Work {
            store: store.clone(),
            step,
            run_id: run_id.to_owned(),
            retention,
            opened: settle(&groups.world, opened)?,
        });
        let claim = groups.is_main().then(|| {
            let work = work.clone();
            Background::start(move |_, _| work.claim())
        });
        let stage = Stage::Claim(settle(&groups.world, claim.transpose())?);
        Ok(Self { work, stage })
    }

    /// The step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.work.step
    }

    /// Begins the next stage if the threads of all ranks have ended; does not wait for them.
    ///
    /// # Errors
    /// Any rank's failure, on every rank. The upload is over; in the store the checkpoint is absent,
    /// unless the answer to the manifest's upload was lost.
    /// # Collective
    /// All ranks of `groups.world`; one bit, and a few messages at the end of a stage.
    pub fn advance(&mut self, groups: &ProcessGroups) -> Result<UploadStage, CheckpointError> {
        let works = TensorData::from([f64::from(u8::from(!self.stage.is_done()))]);
        let any = groups.world.all_reduce(works, ReduceOp::Max)?;
        if any.as_slice::<f64>().is_ok_and(|any| any[0] == 0.0) {
            self.next(groups)
        } else {
            Ok(UploadStage::Pending)
        }
    }

    /// Waits for the threads, stage by stage, until the checkpoint is complete. Returns the bytes of
    /// its files, on rank 0.
    ///
    /// # Errors
    /// As [`advance`](Self::advance).
    /// # Collective
    /// All ranks of `groups.world`; a few messages.
    pub fn finish(&mut self, groups: &ProcessGroups) -> Result<u64, CheckpointError> {
        loop {
            if let UploadStage::Done(num_bytes) = self.next(groups)? {
                return Ok(num_bytes);
            }
        }
    }

    /// Waits for the threads of this stage and begins the next one.
    fn next(&mut self, groups: &ProcessGroups) -> Result<UploadStage, CheckpointError> {
        let world = &groups.world;
        let phase = world.phase(Phase::Save);
        let progress = phase.progress();
        let work = self.work.clone();
        match mem::replace(&mut self.stage, Stage::Done(0)) {
            Stage::Claim(claim) => {
                let claimed = claim.map_or(Ok(()), |claim| claim.wait(progress).and_then(|it| it));
                settle(world, claimed)?;
                let files = Background::start(move |is_cancelled, progress| {
                    work.upload_own(is_cancelled, progress)
                });
                self.stage = Stage::Files(settle(world, files)?);
                Ok(UploadStage::Continued)
            }
            Stage::Files(files) => {
                let mine = files.wait(progress).and_then(|num_bytes| num_bytes);
                let all = objects::gather(world, &settle(world, mine)?)?;
                let finish = groups.is_main().then(|| {
                    Background::start(move |is_cancelled, progress| {
                        work.finish(is_cancelled, progress)
                    })
                });
                let finish = settle(world, finish.transpose())?;
                self.stage = Stage::Finish(finish, all.into_iter().sum());
                Ok(UploadStage::Continued)
            }
            Stage::Finish(finish, num_bytes) => {
                let finished = finish.map(|finish| finish.wait(progress).and_then(|it| it));
                let own = settle(world, finished.transpose())?.unwrap_or_default();
                self.stage = Stage::Done(num_bytes + own);
                Ok(UploadStage::Done(num_bytes + own))
            }
            Stage::Done(num_bytes) => {
                self.stage = Stage::Done(num_bytes);
                Ok(UploadStage::Done(num_bytes))
            }
        }
    }
}

impl Stage {
    /// Whether this rank's thread has ended.
    fn is_done(&self) -> bool {
        match self {
            Self::Claim(work) => work.as_ref().is_none_or(Background::is_done),
            Self::Files(work) => work.is_done(),
            Self::Finish(work, _) => work.as_ref().is_none_or(Background::is_done),
            Self::Done(_) => true,
        }
    }
}

impl Work {
    fn name(&self, name: &str) -> String {
        format!("{}/{name}", step_name(self.step))
    }

    /// Makes room for the checkpoint and marks its folder.
    fn claim(&self) -> Result<(), CheckpointError> {
        let all = self.store.list()?;
        let same = all.iter().find(|stored| stored.step == self.step);
        if let Some(same) = same {
            self.store.check_own(same, &self.run_id)?;
            self.store.delete(same, &self.run_id)?;
        }
        self.store.remove_leftovers(&all, &self.run_id)?;
        let mark = self.name(&mark_of(&self.run_id));
        let text = format!("The run {} of megaburn writes this folder.\n", self.run_id);
        Ok(self.store.folder.put(&mark, text.as_bytes())?)
    }

    /// Uploads this rank's files. Returns their bytes.
    fn upload_own(
        &self,
        is_cancelled: &AtomicBool,
        progress: &Progress,
    ) -> Result<u64, CheckpointError> {
        let transfer = Transfer {
            is_stopped: &|| is_cancelled.load(Ordering::Relaxed),
            on_bytes: &|num_bytes| progress.add(num_bytes),
        };
        let upload = |(name, file): &(String, File)| {
            let folder = &self.store.folder;
            Ok(folder.upload(&self.name(name), file, &transfer)?)
        };
        self.opened.own.iter().map(upload).sum()
    }

    /// Completes the checkpoint and deletes old ones. Returns the bytes of the manifest and its
    /// hash.
    fn finish(
        &self,
        is_cancelled: &AtomicBool,
        progress: &Progress,
    ) -> Result<u64, CheckpointError> {
        let Some(OpenedManifest {
            manifest,
            text,
            hash,
        }) = &self.opened.manifest
        else {
            return Ok(0);
        };
        let incomplete = |why: String| CheckpointError::NotStored {
            url: self.store.url_of(self.step),
            why,
        };
        let all = self.store.list()?;
        let stored = all.iter().find(|stored| stored.step == self.step);
        let stored = stored.ok_or_else(|| incomplete("its objects have disappeared".into()))?;
        self.store.check_own(stored, &self.run_id)?;
        if let Some(why) = first_fault(stored, manifest) {
            return Err(incomplete(why));
        }
        let transfer = Transfer {
            is_stopped: &|| is_cancelled.load(Ordering::Relaxed),
            on_bytes: &|num_bytes| progress.add(num_bytes),
        };
        let mut num_bytes = 0;
        for (name, file) in [(MANIFEST_HASH, hash), (MANIFEST, text)] {
            let folder = &self.store.folder;
            num_bytes += folder.upload(&self.name(name), file, &transfer)?;
        }
        if let Err(error) = self.delete_old() {
            tracing::warn!(
                "old checkpoints in {} were not deleted: {error}",
                self.store.url()
            );
        }
        Ok(num_bytes)
    }

    /// Deletes the checkpoints of the run up to this one that the retention does not keep.
    fn delete_old(&self) -> Result<(), CheckpointError> {
        if self.retention.newest == 0 {
            return Ok(());
        }
        let all = self.store.list()?.into_iter().rev();
        let own: Vec<_> = all
            .filter(|stored| {
                stored.step <= self.step && stored.is_complete() && stored.is_of(&self.run_id)
            })
            .collect();
        let kept = self.retention.kept(own.iter().map(|stored| stored.step));
        own.iter()
            .skip(self.retention.newest)
            .filter(|stored| !kept.contains(&stored.step))
            .try_for_each(|stored| self.store.delete(stored, &self.run_id))
    }
}

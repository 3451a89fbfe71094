//! Uploads a checkpoint while the program keeps computing.

use std::{mem, sync::Arc, sync::atomic::AtomicBool, sync::atomic::Ordering};

use burn::tensor::TensorData;
use megaburn_collective::{Phase, ProcessGroups, Progress, ReduceOp, objects};
use megaburn_store::Transfer;
use serde::{Deserialize, Serialize};

use super::{
    opened::{OpenedCheckpoint, OpenedFile, OpenedManifest},
    store::first_fault,
    stored::StoredCheckpoint,
    writer::StoreWriter,
};
use crate::{
    agree::settle,
    background::{Background, WRITER},
    error::CheckpointError,
    folder::step_name,
    manifest::{MANIFEST, MANIFEST_HASH, Manifest},
    retention::Retention,
};

/// A checkpoint that threads of the ranks are uploading.
///
/// | stage | work of the threads |
/// |---|---|
/// | claim | rank 0 removes leftovers of the run and another checkpoint of the same step, and writes the mark. If the store has this checkpoint already, the upload ends here |
/// | files | each rank uploads its files and hashes them |
/// | finish | rank 0 compares the hashes and the sizes of the objects with the manifest, uploads it, and deletes the checkpoints that are not kept |
///
/// An upload is refused if any folder of the store has the mark of another run, and it ends if
/// another start of this run has taken over.
///
/// [`advance`](Self::advance) asks whether all threads have ended, and begins the next stage if so.
/// If the value is dropped, the threads stop and their uploads are aborted; the next upload of the
/// run removes what is there.
#[derive(Debug)]
pub struct CheckpointUpload {
    work: Arc<Work>,
    stage: Stage,
}

/// The data that the stages work on.
#[derive(Debug)]
struct Work {
    writer: StoreWriter,
    step: u64,
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
    /// Only rank 0 works. It returns the bytes of the checkpoint if the store has it already.
    Claim(Option<Background<Result<Option<u64>, CheckpointError>>>),
    Files(Background<Result<Vec<SentFile>, CheckpointError>>),
    /// Only rank 0 works. It returns the bytes of the manifest and its hash.
    Finish(Option<Background<Result<u64, CheckpointError>>>, u64),
    Done(u64),
}

/// A file that a rank has uploaded.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SentFile {
    name: String,
    num_bytes: u64,
    /// The xxh3 of its bytes, hexadecimal.
    xxh3: String,
}

impl CheckpointUpload {
    /// Starts to upload a checkpoint, of which each rank has opened its files.
    ///
    /// # Errors
    /// Any rank has failed to open its files, or cannot start a thread.
    /// # Collective
    /// All ranks of `groups.world`; a few messages.
    pub fn begin(
        writer: &StoreWriter,
        step: u64,
        retention: Retention,
        opened: Result<OpenedCheckpoint, CheckpointError>,
        groups: &ProcessGroups,
    ) -> Result<Self, CheckpointError> {
        let work = Arc::new(Work {
            writer: writer.clone(),
            step,
            retention,
            opened: settle(&groups.world, opened)?,
        });
        let claim = groups.is_main().then(|| {
            let work = work.clone();
            Background::start(WRITER, move |_, _| work.claim())
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
                let claimed = claim.map(|claim| claim.wait(progress).and_then(|it| it));
                let stored = settle(world, claimed.transpose())?.flatten();
                if let Some(num_bytes) = objects::broadcast(world, &stored)? {
                    self.stage = Stage::Done(num_bytes);
                    return Ok(UploadStage::Done(num_bytes));
                }
                let files = Background::start(WRITER, move |is_cancelled, progress| {
                    work.upload_own(is_cancelled, progress)
                });
                self.stage = Stage::Files(settle(world, files)?);
                Ok(UploadStage::Continued)
            }
            Stage::Files(files) => {
                let mine = files.wait(progress).and_then(|sent| sent);
                let all: Vec<Vec<SentFile>> = objects::gather(world, &settle(world, mine)?)?;
                let sent: Vec<SentFile> = all.into_iter().flatten().collect();
                let num_bytes = sent.iter().map(|file| file.num_bytes).sum();
                let finish = groups.is_main().then(|| {
                    Background::start(WRITER, move |is_cancelled, progress| {
                        work.finish(&sent, is_cancelled, progress)
                    })
                });
                let finish = settle(world, finish.transpose())?;
                self.stage = Stage::Finish(finish, num_bytes);
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

    /// Makes room for the checkpoint and marks its folder. Returns the bytes of the checkpoint if
    /// the store has it already.
    fn claim(&self) -> Result<Option<u64>, CheckpointError> {
        let writer = &self.writer;
        writer.check_start()?;
        let all = writer.store().list()?;
        all.iter().try_for_each(|stored| writer.check_run(stored))?;
        if let Some(same) = all.iter().find(|stored| stored.step == self.step) {
            if let Some(num_bytes) = self.bytes_if_stored(same)? {
                self.delete_old_or_warn();
                return Ok(Some(num_bytes));
            }
            writer.check_own(same)?;
            writer.delete(same)?;
        }
        writer.remove_leftovers(all.iter().filter(|stored| stored.step != self.step))?;
        writer.mark(self.step)?;
        Ok(None)
    }

    /// The bytes of the checkpoint, if `same` is a whole one with an equal manifest.
    fn bytes_if_stored(&self, same: &StoredCheckpoint) -> Result<Option<u64>, CheckpointError> {
        let Some(OpenedManifest { manifest, .. }) = &self.opened.manifest else {
            return Ok(None);
        };
        let found = self.writer.store().whole_manifest(same)?;
        let is_stored = found.is_some_and(|found| found == *manifest);
        let names = [MANIFEST, MANIFEST_HASH].into_iter();
        let names = names.chain(manifest.files.iter().map(|file| file.name.as_str()));
        let objects = names.filter_map(|name| same.object(name));
        let num_bytes = objects.map(|object| object.num_bytes).sum();
        Ok(is_stored.then_some(num_bytes))
    }

    /// Uploads this rank's files.
    fn upload_own(
        &self,
        is_cancelled: &AtomicBool,
        progress: &Progress,
    ) -> Result<Vec<SentFile>, CheckpointError> {
        let transfer = Transfer {
            is_stopped: &|| is_cancelled.load(Ordering::Relaxed),
            on_bytes: &|num_bytes| progress.add(num_bytes),
        };
        let is_stopped = |num_bytes| {
            progress.add(num_bytes);
            is_cancelled.load(Ordering::Relaxed)
        };
        let upload = |file: &OpenedFile| {
            // Another start may have marked the folder, and its files must not be replaced.
            self.writer.check_start()?;
            let folder = &self.writer.store().folder;
            let num_bytes = folder.upload(&self.name(&file.name), &file.file, &transfer)?;
            Ok(SentFile {
                name: file.name.clone(),
                num_bytes,
                xxh3: file.hash(num_bytes, is_stopped)?,
            })
        };
        self.opened.own.iter().map(upload).collect()
    }

    /// Completes the checkpoint and deletes old ones. Returns the bytes of the manifest and its
    /// hash.
    fn finish(
        &self,
        sent: &[SentFile],
        is_cancelled: &AtomicBool,
        progress: &Progress,
    ) -> Result<u64, CheckpointError> {
        let Some(opened) = &self.opened.manifest else {
            return Ok(0);
        };
        let store = self.writer.store();
        let incomplete = |why: String| CheckpointError::NotStored {
            url: store.url_of(self.step),
            why,
        };
        if let Some(why) = other_hash(sent, &opened.manifest) {
            return Err(incomplete(why));
        }
        self.writer.check_start()?;
        let all = store.list()?;
        let stored = all.iter().find(|stored| stored.step == self.step);
        let stored = stored.ok_or_else(|| incomplete("its objects have disappeared".into()))?;
        self.writer.check_mark(stored)?;
        if let Some(why) = first_fault(stored, &opened.manifest) {
            return Err(incomplete(why));
        }
        let transfer = Transfer {
            is_stopped: &|| is_cancelled.load(Ordering::Relaxed),
            on_bytes: &|num_bytes| progress.add(num_bytes),
        };
        let upload = |name: &str, file: &_| store.folder.upload(&self.name(name), file, &transfer);
        let mut num_bytes = upload(MANIFEST_HASH, &opened.hash)?;
        self.writer.check_start()?;
        num_bytes += upload(MANIFEST, &opened.text)?;
        self.delete_old_or_warn();
        Ok(num_bytes)
    }

    fn delete_old_or_warn(&self) {
        if let Err(error) = self.delete_old() {
            let url = self.writer.store().url();
            tracing::warn!("old checkpoints in {url} were not deleted: {error}");
        }
    }

    /// Deletes the checkpoints of the run up to this one that the retention does not keep. Those
    /// that are not whole neither count nor are they deleted.
    fn delete_old(&self) -> Result<(), CheckpointError> {
        let all = self.writer.store().list()?.into_iter().rev();
        let own = all.filter(|stored| {
            stored.step <= self.step && stored.is_complete() && self.writer.is_own(stored)
        });
        let own: Vec<_> = own.collect();
        if self.retention.newest == 0 || own.len() <= self.retention.newest {
            return Ok(());
        }
        let mut whole = Vec::new();
        for stored in own {
            if self.writer.store().whole_manifest(&stored)?.is_some() {
                whole.push(stored);
            }
        }
        let kept = self.retention.kept(whole.iter().map(|stored| stored.step));
        let old = whole.iter().skip(self.retention.newest);
        let mut old = old.filter(|stored| !kept.contains(&stored.step));
        old.try_for_each(|stored| self.writer.delete(stored))
    }
}

/// Why a file that was uploaded is not the one that the manifest describes.
fn other_hash(sent: &[SentFile], manifest: &Manifest) -> Option<String> {
    manifest.files.iter().find_map(|file| {
        let found = sent.iter().find(|sent| sent.name == file.name);
        match found {
            None => Some(format!("no rank has uploaded {}", file.name)),
            Some(sent) if sent.xxh3 != file.xxh3 => Some(format!(
                "{} has the xxh3 {} on this host, but {} was written",
                file.name, sent.xxh3, file.xxh3
            )),
            Some(_) => None,
        }
    })
}

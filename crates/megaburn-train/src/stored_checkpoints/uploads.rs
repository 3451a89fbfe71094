use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use burn::tensor::TensorData;
use megaburn_checkpoint::{
    CheckpointError, CheckpointStore, CheckpointUpload, OpenedCheckpoint, Retention, StoreWriter,
    UploadStage,
};
use megaburn_collective::{ProcessGroups, ReduceOp};

use crate::{error::TrainError, run_folder::RunShare};

/// What each upload of this start needs.
#[derive(Debug)]
pub(super) struct Uploader {
    pub(super) writer: StoreWriter,
    /// The folders of the run, which must still be its own when an upload begins.
    pub(super) share: RunShare,
}

impl Uploader {
    fn store(&self) -> &CheckpointStore {
        self.writer.store()
    }

    /// Checks that no other run has taken this rank's folder.
    fn check_folder(&self) -> Result<(), CheckpointError> {
        self.share.check().map_err(|why| CheckpointError::Guarded {
            path: self.share.place.dir().to_path_buf(),
            why,
        })
    }
}

/// The upload in progress, and the checkpoint that waits for its end.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    uploading: Option<PendingUpload>,
    waiting: Option<WaitingUpload>,
    /// Why the last upload failed, unless another has succeeded since.
    failure: Option<TrainError>,
}

#[derive(Debug)]
struct PendingUpload {
    upload: CheckpointUpload,
    begun: Instant,
}

/// A checkpoint whose files are open.
#[derive(Debug)]
struct WaitingUpload {
    step: u64,
    opened: Result<OpenedCheckpoint, CheckpointError>,
    retention: Retention,
}

/// A checkpoint that was uploaded.
#[derive(Clone, Debug)]
pub(crate) struct UploadedCheckpoint {
    pub(crate) step: u64,
    pub(crate) url: String,
    /// From the start of the upload until it was complete.
    pub(crate) seconds: Duration,
    /// Bytes of its files, on rank 0.
    pub(crate) num_bytes: u64,
}

impl Uploads {
    pub(super) fn is_pending(&self) -> bool {
        self.uploading.is_some() || self.waiting.is_some()
    }

    /// The steps of the checkpoints that are being uploaded or wait.
    pub(super) fn pending_steps(&self) -> BTreeSet<u64> {
        let uploading = self.uploading.iter().map(|pending| pending.upload.step());
        let waiting = self.waiting.iter().map(|waiting| waiting.step);
        uploading.chain(waiting).collect()
    }

    /// Gives up the upload of step `step`, if it waits or has begun.
    pub(super) fn give_up(&mut self, step: u64) {
        self.waiting.take_if(|waiting| waiting.step == step);
        self.uploading
            .take_if(|pending| pending.upload.step() == step);
    }

    /// Opens the checkpoint in the folder `path`, which then waits.
    pub(super) fn add(
        &mut self,
        step: u64,
        path: &Path,
        retention: Retention,
        groups: &ProcessGroups,
    ) {
        let opened = OpenedCheckpoint::open(path, groups.world.rank(), groups.world.size());
        let waiting = WaitingUpload {
            step,
            opened,
            retention,
        };
        if let Some(replaced) = self.waiting.replace(waiting)
            && let Some(pending) = &self.uploading
            && groups.is_main()
        {
            tracing::warn!(
                "the checkpoint of step {} is not uploaded, because the upload of step {} has not \
                 ended and step {step} is newer",
                replaced.step,
                pending.upload.step()
            );
        }
    }

    /// Starts to upload the checkpoint that waits, if no other is being uploaded.
    ///
    /// # Errors
    /// A rank is gone, or another run or start has taken over.
    /// # Collective
    /// All ranks.
    pub(super) fn begin_next(
        &mut self,
        uploader: &Uploader,
        groups: &ProcessGroups,
    ) -> Result<(), TrainError> {
        if self.uploading.is_some() {
            return Ok(());
        }
        let Some(WaitingUpload {
            step,
            opened,
            retention,
        }) = self.waiting.take()
        else {
            return Ok(());
        };
        let begun = Instant::now();
        let opened = uploader.check_folder().and(opened);
        match CheckpointUpload::begin(&uploader.writer, step, retention, opened, groups) {
            Ok(upload) => self.uploading = Some(PendingUpload { upload, begun }),
            Err(error) => self.warn(uploader, step, error, groups)?,
        }
        Ok(())
    }

    /// Continues with the upload in progress. Returns the checkpoint once it is complete.
    ///
    /// # Errors
    /// A rank is gone, or another run or start has taken over.
    /// # Collective
    /// All ranks; nothing is sent if no upload is in progress.
    pub(super) fn advance(
        &mut self,
        uploader: &Uploader,
        groups: &ProcessGroups,
    ) -> Result<Option<UploadedCheckpoint>, TrainError> {
        let Some(mut pending) = self.uploading.take() else {
            return Ok(None);
        };
        match pending.upload.advance(groups) {
            Ok(UploadStage::Done(num_bytes)) => {
                Ok(Some(self.uploaded(uploader, &pending, num_bytes)))
            }
            Ok(UploadStage::Pending | UploadStage::Continued) => {
                self.uploading = Some(pending);
                Ok(None)
            }
            Err(error) => {
                self.warn(uploader, pending.upload.step(), error, groups)?;
                Ok(None)
            }
        }
    }

    /// Waits for the upload in progress. Its failure is a warning if another checkpoint waits.
    ///
    /// # Errors
    /// The last upload fails, or a rank is gone.
    /// # Collective
    /// All ranks.
    pub(super) fn finish_one(
        &mut self,
        uploader: &Uploader,
        groups: &ProcessGroups,
    ) -> Result<Option<UploadedCheckpoint>, TrainError> {
        let Some(mut pending) = self.uploading.take() else {
            return Ok(None);
        };
        match pending.upload.finish(groups) {
            Ok(num_bytes) => Ok(Some(self.uploaded(uploader, &pending, num_bytes))),
            Err(error) => {
                let step = pending.upload.step();
                if self.waiting.is_none() {
                    return Err(upload_error(uploader.store(), step, error));
                }
                self.warn(uploader, step, error, groups)?;
                Ok(None)
            }
        }
    }

    /// Fails if the last upload did.
    ///
    /// # Errors
    /// Why it failed.
    pub(super) fn check_last(&mut self) -> Result<(), TrainError> {
        self.failure.take().map_or(Ok(()), Err)
    }

    fn uploaded(
        &mut self,
        uploader: &Uploader,
        pending: &PendingUpload,
        num_bytes: u64,
    ) -> UploadedCheckpoint {
        self.failure = None;
        let step = pending.upload.step();
        UploadedCheckpoint {
            step,
            url: uploader.store().url_of(step),
            seconds: pending.begun.elapsed(),
            num_bytes,
        }
    }

    /// Turns the failure of an upload into a warning, unless a rank is gone, or another run or
    /// start has taken over.
    ///
    /// # Collective
    /// All ranks; one bit.
    fn warn(
        &mut self,
        uploader: &Uploader,
        step: u64,
        error: CheckpointError,
        groups: &ProcessGroups,
    ) -> Result<(), TrainError> {
        let is_taken_over = error.is_taken_over();
        let error = upload_error(uploader.store(), step, error);
        if error.collective().is_some() {
            return Err(error);
        }
        let mine = TensorData::from([f64::from(u8::from(is_taken_over))]);
        let any = groups.world.all_reduce(mine, ReduceOp::Max)?;
        if any.as_slice::<f64>().is_ok_and(|any| any[0] > 0.0) {
            return Err(error);
        }
        if groups.is_main() {
            tracing::warn!("{error}; training continues, and the next checkpoint is uploaded");
        }
        self.failure = Some(error);
        Ok(())
    }
}

fn upload_error(store: &CheckpointStore, step: u64, error: CheckpointError) -> TrainError {
    TrainError::Upload {
        step,
        url: store.url_of(step),
        source: Box::new(error),
    }
}

use std::{
    path::Path,
    time::{Duration, Instant},
};

use megaburn_checkpoint::{
    CheckpointError, CheckpointStore, CheckpointUpload, OpenedCheckpoint, Retention, UploadStage,
};
use megaburn_collective::ProcessGroups;

use crate::error::TrainError;

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
    /// A rank is gone.
    /// # Collective
    /// All ranks.
    pub(super) fn begin_next(
        &mut self,
        store: &CheckpointStore,
        run_id: &str,
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
        match CheckpointUpload::begin(store, step, run_id, retention, opened, groups) {
            Ok(upload) => self.uploading = Some(PendingUpload { upload, begun }),
            Err(error) => self.warn(upload_error(store, step, error), groups)?,
        }
        Ok(())
    }

    /// Continues with the upload in progress. Returns the checkpoint once it is complete.
    ///
    /// # Errors
    /// A rank is gone.
    /// # Collective
    /// All ranks; nothing is sent if no upload is in progress.
    pub(super) fn advance(
        &mut self,
        store: &CheckpointStore,
        groups: &ProcessGroups,
    ) -> Result<Option<UploadedCheckpoint>, TrainError> {
        let Some(mut pending) = self.uploading.take() else {
            return Ok(None);
        };
        match pending.upload.advance(groups) {
            Ok(UploadStage::Done(num_bytes)) => Ok(Some(self.uploaded(store, &pending, num_bytes))),
            Ok(UploadStage::Pending | UploadStage::Continued) => {
                self.uploading = Some(pending);
                Ok(None)
            }
            Err(error) => {
                let step = pending.upload.step();
                self.warn(upload_error(store, step, error), groups)?;
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
        store: &CheckpointStore,
        groups: &ProcessGroups,
    ) -> Result<Option<UploadedCheckpoint>, TrainError> {
        let Some(mut pending) = self.uploading.take() else {
            return Ok(None);
        };
        match pending.upload.finish(groups) {
            Ok(num_bytes) => Ok(Some(self.uploaded(store, &pending, num_bytes))),
            Err(error) => {
                let error = upload_error(store, pending.upload.step(), error);
                if self.waiting.is_none() {
                    return Err(error);
                }
                self.warn(error, groups)?;
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
        store: &CheckpointStore,
        pending: &PendingUpload,
        num_bytes: u64,
    ) -> UploadedCheckpoint {
        self.failure = None;
        let step = pending.upload.step();
        UploadedCheckpoint {
            step,
            url: store.url_of(step),
            seconds: pending.begun.elapsed(),
            num_bytes,
        }
    }

    /// Turns the failure of an upload into a warning, unless a rank is gone.
    fn warn(&mut self, error: TrainError, groups: &ProcessGroups) -> Result<(), TrainError> {
        if error.collective().is_some() {
            return Err(error);
        }
        if groups.is_main() {
            tracing::warn!("{error}; training continues");
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

//! Writes files as objects, in parts.

use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};

use object_store::{PutOptions, PutPayload, multipart::MultipartStore, multipart::PartId};

use crate::{
    answer::Answer,
    error::{Obstacle, StoreError},
    failure::Failure,
    local_folder::{file_error, read_exact_at},
    object::Object,
    object_folder::Transfer,
    parts::each_part,
    requests::{Purpose, never},
};

/// Bytes of a part of an object.
pub(crate) const PART: u64 = 8 << 20;
/// The most parts of an object in S3.
const MAX_PARTS: u64 = 10_000;
/// How often an upload that the server has forgotten is begun.
const NUM_UPLOADS: usize = 3;
/// How often the abort of an upload is requested.
const ABORT_TRIES: u32 = 3;

/// Writes a small object.
///
/// # Errors
/// It cannot be written.
pub(crate) fn put(
    object: &Object,
    bytes: Vec<u8>,
    is_stopped: &(dyn Fn() -> bool + Sync),
) -> Result<(), StoreError> {
    let payload = PutPayload::from(bytes);
    object
        .requests
        .send(writing("the whole object", is_stopped), || {
            let (objects, path) = (object.requests.store.objects.clone(), object.path.clone());
            let payload = payload.clone();
            async move {
                let put = objects.put_opts(&path, payload, PutOptions::default());
                let (put, answer) = Answer::noted(put).await;
                put.map(drop)
                    .map_err(|error| Failure::of(&error, &answer, false))
            }
        })
}

/// Writes the contents of a file as an object, in parts if it is large; at most a few parts are in
/// memory. Returns its number of bytes.
///
/// # Errors
/// The file cannot be read, the object cannot be written, or the transfer was stopped. Its parts are
/// then removed.
pub(crate) fn upload(
    object: &Object,
    parts: &Arc<dyn MultipartStore>,
    from: &File,
    transfer: &Transfer<'_>,
) -> Result<u64, StoreError> {
    let url = object.url();
    let num_bytes = from.metadata().map_err(file_error(url, "read"))?.len();
    if num_bytes <= PART {
        let mut bytes = vec![0; num_bytes as usize];
        read_exact_at(from, &mut bytes, 0).map_err(file_error(url, "read"))?;
        put(object, bytes, transfer.is_stopped)?;
        (transfer.on_bytes)(num_bytes);
        return Ok(num_bytes);
    }
    for _ in 1..NUM_UPLOADS {
        match Multipart::begin(object, parts, transfer)?.run(from, num_bytes, transfer) {
            // The server has removed the upload, or has completed it although its answer was lost.
            Err(error) if error.obstacle() == Obstacle::Missing => {}
            result => return result.map(|()| num_bytes),
        }
    }
    let last = Multipart::begin(object, parts, transfer)?;
    last.run(from, num_bytes, transfer).map(|()| num_bytes)
}

/// An upload in parts, which is aborted if it is dropped before it is complete.
struct Multipart<'a> {
    object: &'a Object,
    parts: &'a Arc<dyn MultipartStore>,
    id: String,
    is_complete: bool,
}

impl<'a> Multipart<'a> {
    fn begin(
        object: &'a Object,
        parts: &'a Arc<dyn MultipartStore>,
        transfer: &Transfer<'_>,
    ) -> Result<Self, StoreError> {
        let purpose = writing("an upload", transfer.is_stopped);
        let id = object.requests.send(purpose, || {
            let (parts, path) = (parts.clone(), object.path.clone());
            async move {
                let (id, answer) = Answer::noted(parts.create_multipart(&path)).await;
                id.map_err(|error| Failure::of(&error, &answer, false))
            }
        })?;
        Ok(Self {
            object,
            parts,
            id,
            is_complete: false,
        })
    }

    fn run(
        mut self,
        from: &File,
        num_bytes: u64,
        transfer: &Transfer<'_>,
    ) -> Result<(), StoreError> {
        // All parts but the last have the same size.
        let part_bytes = num_bytes
            .div_ceil(MAX_PARTS)
            .next_multiple_of(1 << 20)
            .max(PART);
        let num_parts = num_bytes.div_ceil(part_bytes) as usize;
        let ids: Mutex<Vec<Option<PartId>>> = Mutex::new(vec![None; num_parts]);
        each_part(num_parts, transfer.is_stopped, |part, is_stopped| {
            let at = part as u64 * part_bytes;
            let count = (num_bytes - at).min(part_bytes);
            let mut bytes = vec![0; count as usize];
            let failed = file_error(self.object.url(), "read");
            read_exact_at(from, &mut bytes, at).map_err(failed)?;
            let request = format!("part {} of {num_parts}", part + 1);
            let id = self.put_part(part, bytes, writing(&request, is_stopped))?;
            ids.lock().unwrap_or_else(PoisonError::into_inner)[part] = Some(id);
            (transfer.on_bytes)(count);
            Ok(())
        })?;
        let ids = ids.into_inner().unwrap_or_else(PoisonError::into_inner);
        let ids: Vec<PartId> = ids.into_iter().flatten().collect();
        let purpose = writing("the completion of the upload", transfer.is_stopped);
        self.object.requests.send(purpose, || {
            let (parts, path) = (self.parts.clone(), self.object.path.clone());
            let (id, ids) = (self.id.clone(), ids.clone());
            async move {
                let complete = parts.complete_multipart(&path, &id, ids);
                let (completed, answer) = Answer::noted(complete).await;
                completed
                    .map(drop)
                    .map_err(|error| Failure::of(&error, &answer, false))
            }
        })?;
        self.is_complete = true;
        Ok(())
    }

    fn put_part(
        &self,
        part: usize,
        bytes: Vec<u8>,
        purpose: Purpose<'_>,
    ) -> Result<PartId, StoreError> {
        let payload = PutPayload::from(bytes);
        self.object.requests.send(purpose, || {
            let (parts, path) = (self.parts.clone(), self.object.path.clone());
            let (id, payload) = (self.id.clone(), payload.clone());
            async move {
                let put = parts.put_part(&path, &id, part, payload);
                let (put, answer) = Answer::noted(put).await;
                put.map_err(|error| Failure::of(&error, &answer, false))
            }
        })
    }
}

impl Drop for Multipart<'_> {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let requests = self.object.requests.with_max_tries(ABORT_TRIES);
        // The error before this one is to be reported, and the server forgets an upload that it does
        // not know.
        let _ = requests.send(writing("the abort of the upload", &never), || {
            let (parts, path, id) = (
                self.parts.clone(),
                self.object.path.clone(),
                self.id.clone(),
            );
            async move {
                let (aborted, answer) = Answer::noted(parts.abort_multipart(&path, &id)).await;
                aborted.map_err(|error| Failure::of(&error, &answer, false))
            }
        });
    }
}

fn writing<'a>(request: &'a str, is_stopped: &'a (dyn Fn() -> bool + Sync)) -> Purpose<'a> {
    Purpose {
        action: "written",
        request,
        is_stopped,
    }
}

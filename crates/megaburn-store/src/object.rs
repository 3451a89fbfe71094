use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use futures_util::StreamExt;
use object_store::{GetOptions, GetRange, path::Path};

use crate::{
    answer::Answer,
    error::StoreError,
    failure::{Failure, cause},
    requests::{Purpose, Requests, never},
    version::Version,
};

/// An object of a store, which is read.
#[derive(Clone, Debug)]
pub struct Object {
    pub(crate) requests: Requests,
    pub(crate) path: Path,
}

impl Object {
    /// The URL of the object.
    pub fn url(&self) -> &str {
        &self.requests.url
    }

    /// The last part of the object's name.
    pub fn file_name(&self) -> &str {
        self.path.filename().unwrap_or_default()
    }

    /// The size and version of the object.
    ///
    /// # Errors
    /// The object is missing or may not be read, or the server does not say its size.
    pub fn version(&self) -> Result<Version, StoreError> {
        self.version_unless(&never)
    }

    pub(crate) fn version_unless(
        &self,
        is_stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<Version, StoreError> {
        self.requests.send(reading("its size", is_stopped), || {
            let (objects, path) = (self.requests.store.objects.clone(), self.path.clone());
            async move {
                let options = GetOptions {
                    head: true,
                    ..GetOptions::default()
                };
                let (found, answer) = Answer::noted(objects.get_opts(&path, options)).await;
                let found = found.map_err(|error| Failure::of(&error, &answer, false))?;
                let head = answer.head().ok_or_else(unanswered)?;
                Ok(Version::of(&head, found.meta.size))
            }
        })
    }

    /// A range of the bytes of the object, which is not empty.
    ///
    /// # Errors
    /// It cannot be read, or the object has changed.
    pub fn read(&self, version: &Version, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        self.read_unless(version, range, &never)
    }

    pub(crate) fn read_unless(
        &self,
        version: &Version,
        range: Range<u64>,
        is_stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<u8>, StoreError> {
        let request = format!("bytes {} to {}", range.start, range.end);
        self.requests.send(reading(&request, is_stopped), || {
            self.request(version, range.clone())
        })
    }

    /// One request for a range of bytes.
    pub fn request(
        &self,
        version: &Version,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Vec<u8>, Failure>> + Send + 'static {
        let (objects, path) = (self.requests.store.objects.clone(), self.path.clone());
        let version = version.clone();
        async move {
            let options = GetOptions {
                range: Some(GetRange::Bounded(range.clone())),
                ..GetOptions::default()
            };
            let (found, answer) = Answer::noted(objects.get_opts(&path, options)).await;
            // A server may send another range if the object was cut, so the version comes first.
            if let Some(head) = answer.head().filter(|head| head.status == 206) {
                version.check(&head)?;
            }
            let found = found.map_err(|error| Failure::of(&error, &answer, true))?;
            let mut stream = found.into_stream();
            let num_bytes = (range.end - range.start) as usize;
            let mut bytes = Vec::with_capacity(num_bytes);
            while let Some(part) = stream.next().await {
                let part = part.map_err(|error| Failure::Temporary(cause(&error)))?;
                if part.len() > num_bytes - bytes.len() {
                    let why = format!("more than {num_bytes} bytes were sent");
                    return Err(Failure::Temporary(why));
                }
                bytes.extend_from_slice(&part);
            }
            if bytes.len() < num_bytes {
                let why = format!("only {} of {num_bytes} bytes were sent", bytes.len());
                return Err(Failure::Temporary(why));
            }
            Ok(bytes)
        }
    }

    /// The bytes of a small object.
    ///
    /// # Errors
    /// The object is missing, cannot be read, or has more than `max_bytes`.
    pub fn bytes(&self, max_bytes: u64) -> Result<Vec<u8>, StoreError> {
        let purpose = reading("the whole object", &never);
        self.requests.send(purpose, || {
            let (objects, path) = (Arc::clone(&self.requests.store.objects), self.path.clone());
            async move {
                let get = objects.get_opts(&path, GetOptions::default());
                let (found, answer) = Answer::noted(get).await;
                let found = found.map_err(|error| Failure::of(&error, &answer, false))?;
                if found.meta.size > max_bytes {
                    let size = found.meta.size;
                    let why = format!("it has {size} bytes, and at most {max_bytes} are expected");
                    return Err(Failure::Permanent(why));
                }
                let bytes = found.bytes().await;
                let bytes = bytes.map_err(|error| Failure::Temporary(cause(&error)))?;
                Ok(bytes.to_vec())
            }
        })
    }
}

fn reading<'a>(request: &'a str, is_stopped: &'a (dyn Fn() -> bool + Sync)) -> Purpose<'a> {
    Purpose {
        action: "read",
        request,
        is_stopped,
    }
}

fn unanswered() -> Failure {
    Failure::Temporary("the server did not answer".into())
}

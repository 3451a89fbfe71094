use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{multipart::MultipartStore, path::Path};

use crate::{
    answer::Answer,
    error::StoreError,
    failure::Failure,
    local_folder::file_error,
    location::Location,
    object_folder::{ListedObject, ObjectFolder, Transfer},
    parts::each_part,
    requests::{Purpose, Requests, never},
    upload::{PART, put, upload},
};

/// A folder of objects in S3 or Google Cloud Storage.
#[derive(Debug)]
pub(crate) struct RemoteFolder {
    location: Location,
    parts: Parts,
}

/// A store that takes uploads in parts.
struct Parts(Arc<dyn MultipartStore>);

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Parts")
    }
}

impl RemoteFolder {
    /// # Errors
    /// The store is only read.
    pub(crate) fn new(location: Location) -> Result<Self, StoreError> {
        let parts = location.store.parts.clone();
        let parts = parts.ok_or_else(|| StoreError::Url {
            url: location.url.clone(),
            what: location.store.what,
            why: "objects of http:// and https:// are only read; write s3://, gs:// or \
                  file:///path"
                .into(),
        })?;
        Ok(Self {
            location,
            parts: Parts(parts),
        })
    }

    fn object(&self, name: &str) -> Result<crate::object::Object, StoreError> {
        self.location.object(&format!("/{name}"))
    }
}

impl ObjectFolder for RemoteFolder {
    fn url(&self) -> &str {
        &self.location.url
    }

    fn list(&self) -> Result<Vec<ListedObject>, StoreError> {
        let requests = Requests {
            url: self.location.url.clone(),
            store: self.location.store.clone(),
        };
        let purpose = Purpose {
            action: "listed",
            request: "the list of its objects",
            is_stopped: &never,
        };
        let listed = requests.send(purpose, || {
            let objects = self.location.store.objects.clone();
            let prefix = self.location.prefix.clone();
            async move {
                let list = objects.list(Some(&prefix)).try_collect();
                let (listed, answer) = Answer::noted(list).await;
                listed.map_err(|error| Failure::of(&error, &answer, false))
            }
        })?;
        let listed: Vec<object_store::ObjectMeta> = listed;
        let name = |path: &Path| {
            let name = path.as_ref().strip_prefix(self.location.prefix.as_ref())?;
            Some(name.strip_prefix('/')?.to_owned())
        };
        let found = listed.into_iter().filter_map(|object| {
            Some(ListedObject {
                name: name(&object.location)?,
                num_bytes: object.size,
                modified: Some(object.last_modified.into()),
            })
        });
        let mut found: Vec<_> = found.collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn read(&self, name: &str, max_bytes: u64) -> Result<Vec<u8>, StoreError> {
        self.object(name)?.bytes(max_bytes)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        put(&self.object(name)?, bytes.to_vec(), &never)
    }

    fn upload(&self, name: &str, from: &File, transfer: &Transfer<'_>) -> Result<u64, StoreError> {
        upload(&self.object(name)?, &self.parts.0, from, transfer)
    }

    fn download(
        &self,
        name: &str,
        num_bytes: u64,
        to: &File,
        transfer: &Transfer<'_>,
    ) -> Result<(), StoreError> {
        let object = self.object(name)?;
        let version = object.version_unless(transfer.is_stopped)?;
        if version.num_bytes != num_bytes {
            let url = object.url().into();
            let why = format!(
                "its size was {num_bytes} before, and is {}",
                version.num_bytes
            );
            return Err(StoreError::Changed { url, why });
        }
        let num_parts = num_bytes.div_ceil(PART) as usize;
        each_part(num_parts, transfer.is_stopped, |part, is_stopped| {
            let at = part as u64 * PART;
            let end = (at + PART).min(num_bytes);
            let bytes = object.read_unless(&version, at..end, is_stopped)?;
            to.write_all_at(&bytes, at)
                .map_err(file_error(object.url(), "written"))?;
            (transfer.on_bytes)(end - at);
            Ok(())
        })
    }

    fn delete(&self, name: &str) -> Result<(), StoreError> {
        let object = self.object(name)?;
        let purpose = Purpose {
            action: "deleted",
            request: "its deletion",
            is_stopped: &never,
        };
        object.requests.send(purpose, || {
            let objects = object.requests.store.objects.clone();
            let path = object.path.clone();
            async move {
                let paths = stream::iter([Ok(path)]).boxed();
                let delete = objects
                    .delete_stream(paths)
                    .try_for_each(|_| async { Ok(()) });
                let (deleted, answer) = Answer::noted(delete).await;
                match deleted.map_err(|error| Failure::of(&error, &answer, false)) {
                    Err(Failure::Missing(_)) => Ok(()),
                    deleted => deleted,
                }
            }
        })
    }
}

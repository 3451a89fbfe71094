use std::{path::Path, sync::Arc};

use safetensors::tensor::{Metadata, TensorInfo};

use crate::{
    dtype, error::CheckpointError, plain::PlainFile, runs::Stored, sizes::num_elements,
    tensor_bytes::TensorBytes,
};

/// A safetensors file starts with the length of its header in this many bytes.
const HEADER_LEN: usize = 8;
/// The longest header that the safetensors library reads.
const LONGEST_HEADER: u64 = 100_000_000;
/// The first bytes of a Git LFS pointer, which replaces a file that was not downloaded.
const LFS: &[u8] = b"version https://git-lfs";

/// An open safetensors file and its header.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    file: Arc<PlainFile>,
    header: Metadata,
    data_start: u64,
}

impl SafetensorsFile {
    /// Opens a file and reads its header, but no data.
    ///
    /// # Errors
    /// The file cannot be read, is not a safetensors file, or does not have the length that its
    /// header implies.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = PlainFile::open(path)?;
        let damaged = |why: String| Err(CheckpointError::damaged(path, why));
        let found = file.len();
        let mut head = vec![0; LFS.len().min(usize::try_from(found).unwrap_or(usize::MAX))];
        file.read_at(&mut head, 0)?;
        if head.starts_with(LFS) {
            return damaged("it is only a Git LFS pointer: run `git lfs pull`".into());
        }
        let Some(len) = head.first_chunk::<HEADER_LEN>() else {
            return damaged(format!(
                "it has {found} bytes, too few for a safetensors file"
            ));
        };
        let len = u64::from_le_bytes(*len);
        if len > found - HEADER_LEN as u64 {
            return damaged(format!(
                "its header would have {len} bytes, but the file has only {found}: it is \
                truncated or not a safetensors file"
            ));
        }
        if len > LONGEST_HEADER {
            return damaged(format!(
                "its header would have {len} bytes, but the header of a safetensors file has at \
                most {LONGEST_HEADER}"
            ));
        }
        let mut text = vec![0; len as usize];
        file.read_at(&mut text, HEADER_LEN as u64)?;
        let data_start = HEADER_LEN as u64 + len;
        // The library checks that tensors are consecutive and that their lengths match their
        // shapes.
        let header: Metadata = match serde_json::from_slice(&text) {
            Ok(header) => header,
            Err(error) => return damaged(format!("cannot read its header: {error}")),
        };
        let expected = data_start.checked_add(header.data_len() as u64);
        if Some(found) != expected {
            let what = if expected.is_none_or(|expected| found < expected) {
                "truncated"
            } else {
                "longer than its header says"
            };
            let expected = expected.unwrap_or(u64::MAX);
            return damaged(format!(
                "it is {what}: its header describes {expected} bytes, but it has {found}"
            ));
        }
        for (name, info) in header.tensors() {
            if num_elements(&info.shape).is_none() {
                return damaged(format!(
                    "the shape of tensor `{name}`, {:?}, is too large",
                    info.shape
                ));
            }
        }
        Ok(Self {
            file: Arc::new(file),
            header,
            data_start,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// The file, which stays open as long as something reads it.
    pub(crate) fn bytes(&self) -> Arc<PlainFile> {
        self.file.clone()
    }

    /// The number of bytes before the first tensor's.
    pub(crate) fn data_start(&self) -> u64 {
        self.data_start
    }

    /// The header of a tensor.
    pub(crate) fn info(&self, key: &str) -> Option<&TensorInfo> {
        self.header.info(key)
    }

    /// The names of the tensors.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The position of a tensor's bytes.
    pub(crate) fn stored(&self, info: &TensorInfo) -> Stored<'_> {
        let (start, end) = info.data_offsets;
        let file = &*self.file;
        let size = dtype::size(info.dtype);
        Stored {
            file,
            start: self.data_start + start as u64,
            len: (end - start) as u64,
            size,
        }
    }
}

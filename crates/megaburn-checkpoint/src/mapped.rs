use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::{CheckpointError, error::IoContext, mmap::map};

/// The length of a safetensors header stands before it in this many bytes.
const HEADER_LEN: usize = 8;
/// What a file starts with that stands for one on a Git LFS server.
const LFS: &[u8] = b"version https://git-lfs";

/// A mapped safetensors file and what its header says.
#[derive(Debug)]
pub(crate) struct MappedFile {
    pub(crate) path: PathBuf,
    map: Mmap,
    header: Metadata,
    data_start: usize,
}

impl MappedFile {
    /// Maps a file and reads its header; no data is touched.
    ///
    /// # Errors
    /// A file that cannot be read, is no safetensors file, or is not as long as its header says.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let map = map(path).during("read", path)?;
        let damaged = |why: String| Err(CheckpointError::damaged(path, why));
        let found = map.len();
        if map.starts_with(LFS) {
            return damaged(
                "it only points to the file on a Git LFS server: `git lfs pull`".into(),
            );
        }
        let Some(len) = map.first_chunk() else {
            return damaged(format!("it has {found} bytes, too few for a safetensors file"));
        };
        let len = u64::from_le_bytes(*len);
        let text = usize::try_from(len).ok().and_then(|len| map[HEADER_LEN..].get(..len));
        let Some(text) = text else {
            return damaged(format!(
                "its header would have {len} bytes, and the whole file has {found}: it is truncated or no safetensors file"
            ));
        };
        let data_start = HEADER_LEN + text.len();
        let header: Metadata = match serde_json::from_slice(text) {
            Ok(header) => header,
            Err(error) => return damaged(format!("its header cannot be read: {error}")),
        };
        let expected = data_start + header.data_len();
        if found != expected {
            let what = if found < expected { "truncated" } else { "longer than it says" };
            return damaged(format!(
                "it is {what}: its header speaks of {expected} bytes, and it has {found}"
            ));
        }
        Ok(Self { path: path.to_path_buf(), map, header, data_start })
    }

    /// What the header says of a tensor.
    pub(crate) fn info(&self, key: &str) -> Option<&TensorInfo> {
        self.header.info(key)
    }

    /// The names of its tensors.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The bytes of a tensor.
    pub(crate) fn bytes(&self, info: &TensorInfo) -> &[u8] {
        let (start, end) = info.data_offsets;
        &self.map[self.data_start + start..self.data_start + end]
    }
}

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::TorchError;

/// A range of the bytes of a file, which may be the whole of it.
#[derive(Clone, Debug)]
pub(crate) struct FileRange {
    file: Arc<File>,
    path: Arc<Path>,
    start: u64,
    len: u64,
}

impl FileRange {
    /// Opens a file.
    ///
    /// # Errors
    /// It is missing, a folder, or cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Self, TorchError> {
        let opened = File::open(path).and_then(|file| {
            let metadata = file.metadata()?;
            if metadata.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            Ok((file, metadata.len()))
        });
        let (file, len) = opened.map_err(|source| TorchError::Io {
            action: "open",
            path: path.into(),
            source,
        })?;
        Ok(Self {
            file: Arc::new(file),
            path: path.into(),
            start: 0,
            len,
        })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// A part of it; `None` if it goes beyond the end.
    pub(crate) fn part(&self, range: Range<u64>) -> Option<Self> {
        let len = range.end.checked_sub(range.start)?;
        let is_inside = range.end <= self.len;
        is_inside.then(|| Self {
            start: self.start + range.start,
            len,
            ..self.clone()
        })
    }

    /// Fills a buffer from a place on, all of which is in the range.
    pub(crate) fn fill(&self, buffer: &mut [u8], at: u64) -> Result<(), TorchError> {
        let end = at.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            let why = format!(
                "bytes {at} and {} after it are needed of a part of {} bytes",
                buffer.len(),
                self.len
            );
            return Err(self.damaged(why));
        }
        let read = self.file.read_exact_at(buffer, self.start + at);
        read.map_err(|source| TorchError::Io {
            action: "read",
            path: self.path(),
            source,
        })
    }

    /// All bytes of it. The length was compared with the file's when the range was made.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, TorchError> {
        let len = usize::try_from(self.len);
        let len = len.map_err(|_| self.damaged("it does not fit into memory"))?;
        let mut bytes = vec![0; len];
        self.fill(&mut bytes, 0)?;
        Ok(bytes)
    }

    pub(crate) fn damaged(&self, why: impl Into<String>) -> TorchError {
        TorchError::Damaged {
            path: self.path(),
            why: why.into(),
        }
    }
}

impl rawzip::ReaderAt for FileRange {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let left = usize::try_from(self.len.saturating_sub(at)).unwrap_or(usize::MAX);
        let len = buffer.len().min(left);
        if len == 0 {
            return Ok(0);
        }
        self.file.read_at(&mut buffer[..len], self.start + at)
    }
}

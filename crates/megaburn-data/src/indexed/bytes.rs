use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::error::DataError;
#[cfg(feature = "object-store")]
use crate::remote::RemoteFile;

/// The bytes of a file on this host, or of an object in a store.
#[derive(Debug)]
pub(super) enum Bytes {
    File(File),
    #[cfg(feature = "object-store")]
    Object(RemoteFile),
}

impl Bytes {
    /// Opens a file and returns its size.
    ///
    /// # Errors
    /// It is missing, a folder, or cannot be read.
    pub(super) fn open(path: &Path) -> Result<(Self, u64), DataError> {
        let opened = File::open(path).and_then(|file| {
            let metadata = file.metadata()?;
            if metadata.is_dir() {
                return Err(ErrorKind::IsADirectory.into());
            }
            Ok((Self::File(file), metadata.len()))
        });
        opened.map_err(|source| match source.kind() {
            ErrorKind::NotFound => DataError::Missing { path: path.into() },
            _ => DataError::Io {
                path: path.into(),
                source,
            },
        })
    }

    /// Reads at most as many bytes as the buffer holds; none at the end.
    pub(super) fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read_at(buffer, at),
            #[cfg(feature = "object-store")]
            Self::Object(object) => object.read_at(buffer, at),
        }
    }

    /// Reads as many bytes as the buffer holds.
    pub(super) fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(buffer, at),
            #[cfg(feature = "object-store")]
            Self::Object(object) => object.read_exact_at(buffer, at),
        }
    }

    /// A text that changes if the bytes are written again.
    pub(super) fn version(&self) -> io::Result<String> {
        match self {
            Self::File(file) => {
                let modified = file.metadata()?.modified().ok();
                let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                Ok(since.map_or(0, |since| since.as_nanos()).to_string())
            }
            #[cfg(feature = "object-store")]
            Self::Object(object) => Ok(object.version_name()),
        }
    }
}

/// The error of bytes that cannot be read: the one inside `source`, if it is one of this crate.
pub(super) fn read_error(path: PathBuf, source: io::Error) -> DataError {
    let found = source.downcast();
    found.unwrap_or_else(|source| DataError::Io { path, source })
}

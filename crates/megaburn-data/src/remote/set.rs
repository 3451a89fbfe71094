use std::path::PathBuf;

use super::{config::ObjectStoreConfig, file::RemoteFile, index::copy_of, store::Location};
use crate::error::DataError;

/// The most bytes of the description of a data set.
const MAX_DESCRIPTION: u64 = 64 << 20;

/// The objects of a data set.
#[derive(Debug)]
pub(crate) struct RemoteSet {
    /// The tokens.
    pub(crate) bin: RemoteFile,
    /// The copy of the index on this host.
    pub(crate) idx: PathBuf,
    /// What megaburn wrote next to the data set.
    pub(crate) description: Option<String>,
}

impl RemoteSet {
    /// Opens `PREFIX.bin`, `PREFIX.idx` and `PREFIX.megaburn`, of which the last may be missing.
    /// The index is copied to this host if it was not before.
    ///
    /// # Errors
    /// The URL cannot be used, an object cannot be read, or the copy cannot be written.
    pub(crate) fn open(prefix: &str, config: &ObjectStoreConfig) -> Result<Self, DataError> {
        let location = Location::open(prefix, config)?;
        let (idx, bin) = (location.object(".idx")?, location.object(".bin")?);
        let idx_version = idx.version()?;
        let bin_version = bin.version()?;
        let description = location.object(".megaburn")?.text(MAX_DESCRIPTION)?;
        let idx = copy_of(&idx, &idx_version)?;
        Ok(Self {
            bin: RemoteFile::new(bin, bin_version),
            idx,
            description,
        })
    }
}

/// Where the files of a data set are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// On this host, as `file://` says.
    Local(PathBuf),
    /// In an object store.
    Remote,
}

/// Where a URL is.
///
/// # Errors
/// It is a `file://` URL of another host.
pub(crate) fn source_of(url: &str) -> Result<Source, DataError> {
    let bad = |why: String| DataError::Url {
        url: url.into(),
        why,
    };
    let parsed = url::Url::parse(url).map_err(|error| bad(error.to_string()))?;
    if parsed.scheme() != "file" {
        return Ok(Source::Remote);
    }
    let path = parsed.to_file_path();
    let path = path.map_err(|()| bad("it is no path on this host; write file:///path".into()))?;
    Ok(Source::Local(path))
}

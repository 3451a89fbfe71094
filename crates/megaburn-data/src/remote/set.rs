use std::path::PathBuf;

use megaburn_store::{Location, Obstacle};

use super::{config::ObjectStoreConfig, file::RemoteFile, index::copy_of};
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
        if config.block_bytes == 0 {
            let what = "the number of bytes of a block";
            return Err(DataError::Zero { what });
        }
        let location = Location::open(prefix, "a data set", &config.store)?;
        let (idx, bin) = (location.object(".idx")?, location.object(".bin")?);
        let idx_version = idx.version()?;
        let bin_version = bin.version()?;
        let description = description_at(&location)?;
        let idx = copy_of(&idx, &idx_version, config)?;
        Ok(Self {
            bin: RemoteFile::new(bin, bin_version, config),
            idx,
            description,
        })
    }
}

/// The description of a data set, if there is one. A server that does not let this caller list
/// objects may say that it is denied if there is none.
fn description_at(location: &Location) -> Result<Option<String>, DataError> {
    match location.object(".megaburn")?.bytes(MAX_DESCRIPTION) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.obstacle() != Obstacle::Other => Ok(None),
        Err(error) => Err(error.into()),
    }
}

use std::path::PathBuf;

use megaburn_store::Retry;

/// What happens while a data set in an object store is opened and read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ObjectStoreEvent {
    /// A request failed and is sent again after a delay.
    Retrying(Retry),
    /// The index is not in the cache, so it is copied there.
    Downloading {
        /// The index.
        url: String,
        /// Its copy.
        path: PathBuf,
        /// Number of bytes of the index.
        num_bytes: u64,
    },
    /// This many more bytes of the index were copied.
    Downloaded(u64),
    /// Another process, or another thread of this one, copies an index into this cache. This is
    /// reported several times a second.
    Waiting {
        /// The folder of the cache.
        folder: PathBuf,
    },
}

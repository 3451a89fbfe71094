//! Data sets in object stores: S3, Google Cloud Storage, and HTTP servers that answer requests for
//! ranges of bytes.
//!
//! An [`Object`](object::Object) makes requests and repeats those that fail, a [`RemoteFile`] reads
//! one in blocks and ahead, and [`RemoteSet`] is the three objects of a data set. Requests run on
//! the one thread of `runtime`; the functions of this module wait for them.

mod config;
mod event;
mod url;

#[cfg(feature = "object-store")]
mod answer;
#[cfg(feature = "object-store")]
mod blocks;
#[cfg(feature = "object-store")]
mod failure;
#[cfg(feature = "object-store")]
mod file;
#[cfg(feature = "object-store")]
mod index;
#[cfg(feature = "object-store")]
mod object;
#[cfg(feature = "object-store")]
mod runtime;
#[cfg(feature = "object-store")]
mod set;
#[cfg(feature = "object-store")]
mod store;
#[cfg(feature = "object-store")]
#[cfg(test)]
mod tests;

pub use config::ObjectStoreConfig;
pub use event::ObjectStoreEvent;
#[cfg(feature = "object-store")]
pub(crate) use file::RemoteFile;
#[cfg(feature = "object-store")]
pub(crate) use set::{RemoteSet, Source, source_of};
pub use url::is_url;
pub(crate) use url::missing;

//! Data sets in object stores: S3, Google Cloud Storage, and HTTP servers that answer requests for
//! ranges of bytes.
//!
//! `megaburn-store` makes requests and repeats those that fail. A [`RemoteFile`] reads an object in
//! blocks and ahead, and [`RemoteSet`] is the three objects of a data set.

mod config;
mod event;
mod missing;

#[cfg(feature = "object-store")]
mod blocks;
#[cfg(feature = "object-store")]
mod file;
#[cfg(feature = "object-store")]
mod index;
#[cfg(feature = "object-store")]
mod set;
#[cfg(feature = "object-store")]
#[cfg(test)]
mod tests;

pub use config::ObjectStoreConfig;
pub use event::ObjectStoreEvent;
#[cfg(feature = "object-store")]
pub(crate) use file::RemoteFile;
pub(crate) use missing::missing;
#[cfg(feature = "object-store")]
pub(crate) use set::RemoteSet;

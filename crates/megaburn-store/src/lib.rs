//! Objects in S3, Google Cloud Storage and HTTP servers: data sets are read from them, and checkpoints
//! are kept in them. Requests that fail are sent again, and errors name the URL and what to do.
//!
//! [`open_folder`] opens a folder of objects at `s3://`, `gs://` or `file://`: objects are put,
//! uploaded in parts, listed, downloaded and deleted. An object is complete or absent. With the
//! feature `object-store`, `Location` and `Object` read ranges of objects, also from HTTP servers.
//!
//! ```
//! use megaburn_store::{StoreConfig, open_folder};
//!
//! let dir = tempfile::tempdir()?;
//! let url = format!("file://{}/run", dir.path().display());
//! let folder = open_folder(&url, "a run's checkpoints", &StoreConfig::new())?;
//! folder.put("notes.txt", b"12 steps")?;
//! let listed = folder.list()?;
//! assert_eq!((listed[0].name.as_str(), listed[0].num_bytes), ("notes.txt", 8));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod config;
mod error;
mod local_folder;
mod object_folder;
mod open;
mod retry;
mod url;

#[cfg(feature = "object-store")]
mod answer;
#[cfg(feature = "object-store")]
mod failure;
#[cfg(feature = "object-store")]
mod location;
#[cfg(feature = "object-store")]
mod object;
#[cfg(feature = "object-store")]
mod parts;
#[cfg(feature = "object-store")]
mod remote_folder;
#[cfg(feature = "object-store")]
mod requests;
#[cfg(feature = "object-store")]
mod runtime;
#[cfg(feature = "object-store")]
mod store;
#[cfg(feature = "object-store")]
mod upload;
#[cfg(feature = "object-store")]
mod version;

#[cfg(test)]
mod tests;

pub use config::StoreConfig;
pub use error::{Obstacle, StoreError};
#[cfg(feature = "object-store")]
pub use failure::Failure;
pub use local_folder::UNFINISHED;
#[cfg(feature = "object-store")]
pub use location::Location;
#[cfg(feature = "object-store")]
pub use object::Object;
pub use object_folder::{ListedObject, ObjectFolder, Transfer};
pub use open::open_folder;
pub use retry::Retry;
#[cfg(feature = "object-store")]
pub use runtime::spawn;
pub use url::{is_url, local_path_of};
#[cfg(feature = "object-store")]
pub use version::Version;

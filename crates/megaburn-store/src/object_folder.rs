use std::fmt;
use std::fs::File;
use std::time::SystemTime;

use crate::error::StoreError;

/// A folder of objects, of which each is complete or absent.
///
/// Names are relative to the folder, such as `step-00000003/manifest.json`. Requests are repeated
/// while they may still succeed, so a call may have had its effect although it failed.
pub trait ObjectFolder: fmt::Debug + Send + Sync {
    /// The URL of the folder, without a `/` at its end.
    fn url(&self) -> &str;

    /// All objects in the folder and the folders in it, in the order of their names.
    ///
    /// # Errors
    /// The folder cannot be listed. One that does not exist has no objects.
    fn list(&self) -> Result<Vec<ListedObject>, StoreError>;

    /// The bytes of a small object.
    ///
    /// # Errors
    /// It is missing, cannot be read, or has more than `max_bytes`.
    fn read(&self, name: &str, max_bytes: u64) -> Result<Vec<u8>, StoreError>;

    /// Writes a small object, in place of one of the same name.
    ///
    /// # Errors
    /// It cannot be written.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError>;

    /// Writes the contents of a file as an object, in place of one of the same name. Returns its
    /// number of bytes.
    ///
    /// # Errors
    /// The file cannot be read, the object cannot be written, or the transfer was stopped. The
    /// object of before then remains, and no parts of the new one do.
    fn upload(&self, name: &str, from: &File, transfer: &Transfer<'_>) -> Result<u64, StoreError>;

    /// Writes the bytes of an object, which has `num_bytes`, into an empty file.
    ///
    /// # Errors
    /// The object cannot be read or has another size, the file cannot be written, or the transfer
    /// was stopped. The file then holds a part of it.
    fn download(
        &self,
        name: &str,
        num_bytes: u64,
        to: &File,
        transfer: &Transfer<'_>,
    ) -> Result<(), StoreError>;

    /// Deletes an object. One that does not exist is deleted already.
    ///
    /// # Errors
    /// It cannot be deleted.
    fn delete(&self, name: &str) -> Result<(), StoreError>;
}

/// An object in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its name, relative to the folder.
    pub name: String,
    /// Its size.
    pub num_bytes: u64,
    /// When it was written, if that is known.
    pub modified: Option<SystemTime>,
}

/// The progress of a transfer, and whether it continues.
#[derive(Clone, Copy)]
pub struct Transfer<'a> {
    /// Whether the transfer is given up. It is asked several times a second.
    pub is_stopped: &'a (dyn Fn() -> bool + Sync),
    /// Is called with numbers of bytes as they are transferred.
    pub on_bytes: &'a (dyn Fn(u64) + Sync),
}

impl fmt::Debug for Transfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").finish_non_exhaustive()
    }
}

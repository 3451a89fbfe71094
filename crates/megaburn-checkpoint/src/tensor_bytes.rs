use std::{fmt::Debug, path::Path};

use crate::error::CheckpointError;

/// Bytes that tensors are read from, at any place: a file, or what stands in for one.
pub trait TensorBytes: Debug + Send + Sync {
    /// The file, or the folder of several, for messages.
    fn path(&self) -> &Path;

    /// Fills the buffer with the bytes from `at` on.
    ///
    /// # Errors
    /// There are not that many bytes, or they cannot be read.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError>;
}

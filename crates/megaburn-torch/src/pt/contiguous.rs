use crate::error::TorchError;
use crate::file_range::FileRange;

/// The bytes of a tensor that are one range of a file: its elements in row-major order.
///
/// It keeps the file open, and can be read after the [`PtFile`](super::PtFile) is gone.
#[derive(Clone, Debug)]
pub struct ContiguousBytes {
    range: FileRange,
}

impl ContiguousBytes {
    pub(super) fn new(range: FileRange) -> Self {
        Self { range }
    }

    /// The number of bytes.
    pub fn num_bytes(&self) -> u64 {
        self.range.len()
    }

    /// Fills a buffer with the bytes from `at` on. No others are read.
    ///
    /// # Errors
    /// The tensor ends before the buffer is full, or the file cannot be read.
    pub fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), TorchError> {
        self.range.fill(buffer, at)
    }
}

//! This module hashes the bytes that are written to a file.

use xxhash_rust::xxh3::Xxh3;

use super::{finite::are_finite, planned_tensor::LoadedTensor};
use crate::{chunks::ChunkHasher, error::CheckpointError};

/// Bytes that are checked and hashed twice while they are in the processor's cache.
const BLOCK: usize = 128 << 10;

/// The hashes of a file and of the chunks of its pieces.
pub(super) struct FileHasher {
    file: Xxh3,
    /// Of each piece, in file order.
    chunks: Vec<Vec<String>>,
}

impl FileHasher {
    /// `header` is the start of the file.
    pub(super) fn new(header: &[u8]) -> Self {
        let mut file = Xxh3::new();
        file.update(header);
        Self {
            file,
            chunks: Vec::new(),
        }
    }

    /// Hashes the pieces of the next tensor.
    ///
    /// # Errors
    /// A value is not finite, although all must be.
    pub(super) fn add(&mut self, tensor: &LoadedTensor<'_>) -> Result<(), CheckpointError> {
        let plan = &tensor.plan;
        for written in &plan.pieces {
            let mut chunks = ChunkHasher::new();
            tensor.for_each_run(written, |run| {
                for block in run.chunks(BLOCK) {
                    if plan.must_be_finite && !are_finite(plan.dtype, block) {
                        let name = plan.name.clone();
                        return Err(CheckpointError::NotFinite { name });
                    }
                    chunks.update(block);
                    self.file.update(block);
                }
                Ok(())
            })?;
            self.chunks.push(chunks.finish());
        }
        Ok(())
    }

    /// Returns the hash of the file and the hashes of the chunks of each piece.
    pub(super) fn finish(self) -> (u64, Vec<Vec<String>>) {
        (self.file.digest(), self.chunks)
    }
}

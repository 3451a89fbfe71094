//! Hashes of chunks of a tensor, so that exactly the bytes that are used are verified.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use xxhash_rust::xxh3::Xxh3;

use crate::{error::CheckpointError, hex::hex, tensor_bytes::TensorBytes};

/// Bytes of a tensor per hash; the last chunk of a tensor may be smaller.
pub(crate) const CHUNK: u64 = 64 << 20;

/// A chunk of a file: the number of its piece, and its own number in that piece.
pub(crate) type ChunkOfFile = (usize, usize);

/// Whether a manifest may declare chunks of this many bytes. They must be a power of two, so that
/// they are a multiple or a divisor of read blocks and elements.
pub(crate) fn is_chunk(bytes: u64) -> bool {
    bytes.is_power_of_two() && (8..=1 << 40).contains(&bytes)
}

/// Hashes a tensor's bytes as they are written.
pub(crate) struct ChunkHasher {
    hash: Xxh3,
    filled: u64,
    done: Vec<String>,
}

impl ChunkHasher {
    pub(crate) fn new() -> Self {
        Self {
            hash: Xxh3::new(),
            filled: 0,
            done: Vec::new(),
        }
    }

    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = usize::try_from(CHUNK - self.filled).unwrap_or(usize::MAX);
            let (here, later) = bytes.split_at(room.min(bytes.len()));
            self.hash.update(here);
            self.filled += here.len() as u64;
            bytes = later;
            if self.filled == CHUNK {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        self.done.push(hex(self.hash.digest()));
        self.hash.reset();
        self.filled = 0;
    }

    /// The hashes of all chunks.
    pub(crate) fn finish(mut self) -> Vec<String> {
        if self.filled > 0 {
            self.close();
        }
        self.done
    }
}

/// The chunks of a stored piece of a tensor.
#[derive(Debug)]
pub(crate) struct Chunks<'a> {
    /// The tensor's name, for messages.
    pub(crate) tensor: &'a str,
    /// Bytes per chunk.
    pub(crate) len: u64,
    /// The hash of each chunk.
    pub(crate) hashes: &'a [String],
    /// Which chunks this process has read and verified.
    pub(crate) seen: &'a [AtomicBool],
}

impl Chunks<'_> {
    /// Whether the chunk was verified before.
    pub(crate) fn is_seen(&self, chunk: usize) -> bool {
        self.seen[chunk].load(Ordering::Relaxed)
    }

    /// Compares the hash of the bytes read with the stored hash.
    pub(crate) fn compare(
        &self,
        chunk: usize,
        bytes: Range<u64>,
        hash: u64,
        file: &dyn TensorBytes,
    ) -> Result<(), CheckpointError> {
        let found = hex(hash);
        let written = &self.hashes[chunk];
        if found != *written {
            let Range { start, end } = bytes;
            let why = format!(
                "bytes {start}..{end} of tensor `{}` (chunk {chunk} of {}) have xxh3 {found}, \
                but {written} was written",
                self.tensor,
                self.hashes.len()
            );
            return Err(CheckpointError::damaged(file.path(), why));
        }
        self.seen[chunk].store(true, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[test]
    fn a_chunk_is_hashed_however_its_bytes_come() {
        assert!(ChunkHasher::new().finish().is_empty());
        let bytes: Vec<u8> = (0..CHUNK + 5).map(|i| ((i * 7) >> 3) as u8).collect();
        let expected: Vec<_> = bytes
            .chunks(CHUNK as usize)
            .map(|chunk| hex(xxh3_64(chunk)))
            .collect();
        for step in [bytes.len(), (CHUNK - 1) as usize, 10_000_001] {
            let mut hasher = ChunkHasher::new();
            bytes.chunks(step).for_each(|part| hasher.update(part));
            assert_eq!(hasher.finish(), expected);
        }
        assert!(is_chunk(CHUNK) && is_chunk(8) && !is_chunk(0) && !is_chunk(12));
    }
}

use std::io::{self, ErrorKind};
use std::ops::Range;

use megaburn_store::{Object, Version, spawn};

use super::{
    blocks::{Blocks, Found},
    config::ObjectStoreConfig,
};
use crate::error::DataError;

/// An object that is read like a file.
///
/// Reads that follow each other fetch blocks, and the block after them in the background. Other
/// reads fetch only their own bytes, unless the blocks hold the whole object: samples in random
/// order would fetch a block for a few kilobytes each.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    object: Object,
    version: Version,
    blocks: Blocks,
    block_bytes: u64,
}

impl RemoteFile {
    /// An object of the version that its [`Object::version`] was.
    pub(super) fn new(object: Object, version: Version, config: &ObjectStoreConfig) -> Self {
        Self {
            blocks: Blocks::new(config.num_blocks),
            block_bytes: config.block_bytes as u64,
            object,
            version,
        }
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        self.version.num_bytes
    }

    /// A text that changes with the contents.
    pub(crate) fn version_name(&self) -> String {
        let Version {
            e_tag, modified, ..
        } = &self.version;
        e_tag.clone().or(modified.clone()).unwrap_or_default()
    }

    /// Reads bytes at a position: as many as the buffer holds, or fewer at the end of the object.
    ///
    /// # Errors
    /// They cannot be read, or the object has changed: a [`DataError`] inside the error.
    pub(crate) fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let left = self.version.num_bytes.saturating_sub(at);
        let count = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        if count > 0 {
            self.read(&mut buffer[..count], at)
                .map_err(io::Error::other)?;
        }
        Ok(count)
    }

    /// Reads bytes at a position.
    ///
    /// # Errors
    /// As [`Self::read_at`], and the object ends before them.
    pub(crate) fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        if self.read_at(buffer, at)? < buffer.len() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Reads bytes of the object at a position.
    ///
    /// # Errors
    /// They cannot be read, or the object has changed.
    pub(super) fn read(&self, buffer: &mut [u8], begin: u64) -> Result<(), DataError> {
        let follows = self.blocks.follows(begin, begin + buffer.len() as u64);
        let in_blocks = follows || self.version.num_bytes <= self.most_in_memory();
        let mut at = begin;
        let mut rest = buffer;
        while !rest.is_empty() {
            let (block, offset) = (at / self.block_bytes, (at % self.block_bytes) as usize);
            // Bytes of two blocks are one request if they are not read in blocks.
            let most = self.block_bytes as usize - if in_blocks { offset } else { 0 };
            let (part, after) = rest.split_at_mut(most.min(rest.len()));
            if in_blocks {
                self.read_in_block(block, offset, part)?;
                if follows {
                    self.read_ahead(block + 1);
                }
            } else if !self.blocks.copy(block, offset, part) {
                self.read_alone(at, part)?;
            }
            at += part.len() as u64;
            rest = after;
        }
        Ok(())
    }

    /// The most bytes of blocks in memory.
    fn most_in_memory(&self) -> u64 {
        self.block_bytes
            .saturating_mul(self.blocks.capacity() as u64)
    }

    fn read_in_block(&self, block: u64, offset: usize, part: &mut [u8]) -> Result<(), DataError> {
        match self.blocks.copy_or_reserve(block, offset, part) {
            Found::Copied => Ok(()),
            Found::NoPlace => self.read_alone(block * self.block_bytes + offset as u64, part),
            Found::Reserved(reserved) => {
                let bytes = self.object.read(&self.version, self.range_of(block))?;
                part.copy_from_slice(&bytes[offset..offset + part.len()]);
                reserved.fill(bytes);
                Ok(())
            }
        }
    }

    fn read_alone(&self, at: u64, part: &mut [u8]) -> Result<(), DataError> {
        let range = at..at + part.len() as u64;
        let bytes = self.object.read(&self.version, range)?;
        part.copy_from_slice(&bytes);
        Ok(())
    }

    /// Requests a block in the background. It is requested once: if that fails, the thread that
    /// needs the block requests it again, and reports why it fails.
    fn read_ahead(&self, block: u64) {
        if self.blocks.capacity() < 2 || block * self.block_bytes >= self.version.num_bytes {
            return;
        }
        let Some(reserved) = self.blocks.reserve(block) else {
            return;
        };
        let request = self.object.request(&self.version, self.range_of(block));
        // Without the thread of requests, the thread that needs the block reports the error.
        let _ = spawn(async move {
            if let Ok(bytes) = request.await {
                reserved.fill(bytes);
            }
        });
    }

    fn range_of(&self, block: u64) -> Range<u64> {
        let begin = block * self.block_bytes;
        begin..self.version.num_bytes.min(begin + self.block_bytes)
    }

    #[cfg(test)]
    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }
}

use std::io::{self, Read};

use super::bytes::Bytes;

/// A range of bytes, read without moving the position of the file.
pub(super) struct Section<'a> {
    pub(super) from: &'a Bytes,
    pub(super) at: u64,
    pub(super) end: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let wanted = left.min(buffer.len());
        let count = self.from.read_at(&mut buffer[..wanted], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

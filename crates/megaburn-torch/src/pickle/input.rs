use super::error::PickleError;

/// The bytes of a pickle, and how far they were read.
#[derive(Debug)]
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The number of bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn error(&self, why: impl Into<String>) -> PickleError {
        PickleError::new(self.at, why)
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], PickleError> {
        let taken = self.bytes[self.at..].get(..len);
        let taken = taken.ok_or_else(|| PickleError::truncated(self.bytes.len()))?;
        self.at += len;
        Ok(taken)
    }

    /// Takes as many bytes as a length that was read says.
    pub(super) fn take_long(&mut self, len: u64) -> Result<&'a [u8], PickleError> {
        let len = usize::try_from(len).map_err(|_| PickleError::truncated(self.bytes.len()))?;
        self.take(len)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8, PickleError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, PickleError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, PickleError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, PickleError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A line without its end.
    pub(super) fn line(&mut self) -> Result<&'a [u8], PickleError> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n');
        let end = end.ok_or_else(|| PickleError::truncated(self.bytes.len()))?;
        self.at += end + 1;
        Ok(&rest[..end])
    }

    /// A line of text.
    pub(super) fn text_line(&mut self) -> Result<&'a str, PickleError> {
        let line = self.line()?;
        self.text(line)
    }

    pub(super) fn text(&self, bytes: &'a [u8]) -> Result<&'a str, PickleError> {
        std::str::from_utf8(bytes).map_err(|_| self.error("a string is not valid UTF-8"))
    }
}

/// The fields of a message in the wire format of Protocol Buffers.
///
/// Source: <https://protobuf.dev/programming-guides/encoding>.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    /// Position of the next field in `bytes`, and of `bytes` in the file.
    at: usize,
    start: usize,
}

/// The value of a field.
#[derive(Clone, Copy, Debug)]
pub(super) enum Field<'a> {
    /// An integer or a truth value.
    Integer(u64),
    /// A float of 32 bits.
    Float(f32),
    /// A string, bytes or a message, with its position in the file.
    Bytes(&'a [u8], usize),
    /// A value of 64 bits, which no field of a model has.
    Wide,
}

impl<'a> Fields<'a> {
    /// The fields of the message `bytes`, which begins at `start` in the file.
    pub(super) fn new(bytes: &'a [u8], start: usize) -> Self {
        Self {
            bytes,
            at: 0,
            start,
        }
    }

    /// The number and value of the next field; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, Field<'a>)>, String> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let at = self.start + self.at;
        let key = self.integer()?;
        let value = match key & 7 {
            0 => Field::Integer(self.integer()?),
            1 => {
                self.take(8)?;
                Field::Wide
            }
            2 => {
                let length = self.integer()?;
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                let start = self.start + self.at;
                Field::Bytes(self.take(length)?, start)
            }
            5 => {
                let bytes = self.take(4)?;
                let bits = bytes
                    .iter()
                    .rev()
                    .fold(0, |bits, &byte| bits << 8 | u32::from(byte));
                Field::Float(f32::from_bits(bits))
            }
            kind => {
                return Err(format!(
                    "byte {at} begins a field of the unknown type {kind}"
                ));
            }
        };
        Ok(Some((key >> 3, value)))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        if length > rest.len() {
            return Err(format!(
                "a field at byte {} has {length} bytes, but {} follow: the file was cut or is damaged",
                self.start + self.at,
                rest.len()
            ));
        }
        self.at += length;
        Ok(&rest[..length])
    }

    fn integer(&mut self) -> Result<u64, String> {
        let start = self.start + self.at;
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(format!("byte {start} begins a number of more than 64 bits"))
    }
}

//! Reads messages of Protocol Buffers by their description, independently of what writes them.

/// The value of a field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Field {
    Varint(u64),
    Double(f64),
    Float(f32),
    Bytes(Vec<u8>),
}

/// The fields of a message with their numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fields(Vec<(u64, Field)>);

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return value;
        }
    }
    unreachable!()
}

fn take<'a>(bytes: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(len);
    *bytes = rest;
    taken
}

impl Fields {
    pub(super) fn parse(mut bytes: &[u8]) -> Self {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let field = match key & 7 {
                0 => Field::Varint(varint(&mut bytes)),
                1 => Field::Double(f64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
                2 => {
                    let len = varint(&mut bytes) as usize;
                    Field::Bytes(take(&mut bytes, len).to_vec())
                }
                5 => Field::Float(f32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
                other => panic!("wire type {other}"),
            };
            fields.push((key >> 3, field));
        }
        Self(fields)
    }

    /// All fields of a number.
    pub(super) fn all(&self, number: u64) -> impl Iterator<Item = &Field> {
        let of_number = move |(of, _): &&(u64, Field)| *of == number;
        self.0.iter().filter(of_number).map(|(_, field)| field)
    }

    pub(super) fn messages(&self, number: u64) -> Vec<Self> {
        let parse = |field: &Field| match field {
            Field::Bytes(bytes) => Self::parse(bytes),
            other => panic!("{other:?} is no message"),
        };
        self.all(number).map(parse).collect()
    }

    pub(super) fn text(&self, number: u64) -> Option<String> {
        match self.all(number).next()? {
            Field::Bytes(bytes) => Some(String::from_utf8(bytes.clone()).unwrap()),
            other => panic!("{other:?} is no text"),
        }
    }

    pub(super) fn number(&self, number: u64) -> Option<u64> {
        match self.all(number).next()? {
            Field::Varint(value) => Some(*value),
            other => panic!("{other:?} is no integer"),
        }
    }
}

/// A checksum, bit by bit, with a reflected polynomial.
fn crc(bytes: &[u8], polynomial: u32) -> u32 {
    let byte = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { polynomial } else { 0 }
        })
    };
    !bytes.iter().fold(!0, byte)
}

/// CRC-32C (Castagnoli).
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    crc(bytes, 0x82f6_3b78)
}

/// CRC-32 of zlib.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    crc(bytes, 0xedb8_8320)
}

#[test]
fn checksums_are_those_of_their_catalogue() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

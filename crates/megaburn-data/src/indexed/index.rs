//! The `.idx` file, little endian: magic number, version, code of the token type, number of
//! sequences and of document entries; then the length of each sequence (i32), its byte position in
//! the `.bin` file (i64), and the number of sequences before each document and at the end (i64).

use std::io::{self, Read, Write};
use std::path::Path;

use super::TokenType;
use crate::error::DataError;

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Bytes before the lengths.
const HEADER_BYTES: u64 = 34;
/// More sequences or documents than any disk holds, so that sizes computed from them do not
/// overflow.
const MOST: u64 = 1 << 48;

/// The fixed part of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) token_type: TokenType,
    pub(crate) num_sequences: u64,
    pub(crate) num_documents: u64,
}

impl Header {
    pub(crate) fn lengths_at(&self) -> u64 {
        HEADER_BYTES
    }

    pub(crate) fn pointers_at(&self) -> u64 {
        HEADER_BYTES + 4 * self.num_sequences
    }

    pub(crate) fn documents_at(&self) -> u64 {
        HEADER_BYTES + 12 * self.num_sequences
    }

    /// The size of the index without modes of sequences.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.documents_at() + 8 * (self.num_documents + 1)
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[self.token_type.code()])?;
        out.write_all(&self.num_sequences.to_le_bytes())?;
        out.write_all(&(self.num_documents + 1).to_le_bytes())
    }

    /// Reads the header of the index `path`.
    ///
    /// # Errors
    /// It is not an index of version 1 whose tokens are integers.
    pub(crate) fn read(path: &Path, from: &mut impl Read) -> Result<Self, DataError> {
        let bad = |why: String| DataError::BadIndex {
            path: path.into(),
            why,
        };
        let mut bytes = [0; HEADER_BYTES as usize];
        from.read_exact(&mut bytes)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => bad("it is shorter than a header".into()),
                _ => DataError::Io {
                    path: path.into(),
                    source: error,
                },
            })?;
        if &bytes[..9] != MAGIC {
            return Err(bad("it does not begin with MMIDIDX".into()));
        }
        let number = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if number(9) != VERSION {
            return Err(bad(format!("its version is {}, not 1", number(9))));
        }
        let Some(token_type) = TokenType::from_code(bytes[17]) else {
            let code = bytes[17];
            return Err(bad(format!("code {code} is not a type of tokens")));
        };
        let (num_sequences, entries) = (number(18), number(26));
        if entries == 0 || num_sequences.max(entries) > MOST {
            return Err(bad(format!(
                "it claims {num_sequences} sequences and {entries} document entries"
            )));
        }
        Ok(Self {
            token_type,
            num_sequences,
            num_documents: entries - 1,
        })
    }
}

/// Writes an index. `lengths` gives the lengths of all sequences, and is called twice; `documents`
/// are the numbers of sequences up to the end of each document.
pub(crate) fn write_index<L>(
    out: &mut impl Write,
    header: Header,
    lengths: impl Fn() -> io::Result<L>,
    documents: impl Iterator<Item = io::Result<i64>>,
) -> io::Result<()>
where
    L: Iterator<Item = io::Result<i32>>,
{
    header.write(out)?;
    for length in lengths()? {
        out.write_all(&length?.to_le_bytes())?;
    }
    let mut pointer = 0i64;
    for length in lengths()? {
        out.write_all(&pointer.to_le_bytes())?;
        pointer += i64::from(length?) * header.token_type.size() as i64;
    }
    out.write_all(&0i64.to_le_bytes())?;
    for end in documents {
        out.write_all(&end?.to_le_bytes())?;
    }
    Ok(())
}

/// The next `count` numbers of 4 bytes.
pub(crate) fn i32s(mut from: impl Read, count: u64) -> impl Iterator<Item = io::Result<i32>> {
    (0..count).map(move |_| {
        let mut word = [0; 4];
        from.read_exact(&mut word)
            .map(|()| i32::from_le_bytes(word))
    })
}

/// The next `count` numbers of 8 bytes.
pub(crate) fn i64s(mut from: impl Read, count: u64) -> impl Iterator<Item = io::Result<i64>> {
    (0..count).map(move |_| {
        let mut word = [0; 8];
        from.read_exact(&mut word)
            .map(|()| i64::from_le_bytes(word))
    })
}

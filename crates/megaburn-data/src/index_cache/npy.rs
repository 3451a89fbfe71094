//! NumPy's `.npy` files of integers, as `numpy.save` writes them: a header that names type and
//! shape, then the numbers, little endian.
//!
//! Source: `numpy/lib/format.py`.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{error::DataError, part::AppendFile};

/// Bytes that a header is a multiple of.
const ALIGNMENT: usize = 64;
/// A header has space for a first dimension of this number of digits, so that arrays can grow.
const GROWTH_DIGITS: usize = 21;

/// An integer type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NpyType {
    I16,
    I32,
    U32,
    I64,
    U64,
}

impl NpyType {
    fn size(self) -> usize {
        match self {
            Self::I16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 | Self::U64 => 8,
        }
    }

    fn descr(self) -> &'static str {
        match self {
            Self::I16 => "<i2",
            Self::I32 => "<i4",
            Self::U32 => "<u4",
            Self::I64 => "<i8",
            Self::U64 => "<u8",
        }
    }

    /// The number in `size` bytes. One of 64 bits without a sign must be below 2^63.
    fn number(self, bytes: &[u8]) -> i64 {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let word = i64::from_le_bytes(word);
        match self {
            Self::I16 => i64::from(word as i16),
            Self::I32 => i64::from(word as i32),
            Self::U32 | Self::I64 | Self::U64 => word,
        }
    }
}

/// Type and shape of an array: `[rows]`, or `[rows, row_len]` if a row has several numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NpyShape {
    pub(crate) of: NpyType,
    /// `None` for as many as are written, which the file says.
    pub(crate) rows: Option<u64>,
    /// Number of numbers of a row.
    pub(crate) row_len: u64,
}

impl NpyShape {
    /// Number of bytes of a row.
    fn row_bytes(&self) -> u64 {
        self.row_len * self.of.size() as u64
    }

    /// The bytes before the numbers, of which there are equally many for all numbers of rows.
    fn header(&self, rows: u64) -> Vec<u8> {
        let rows = rows.to_string();
        let shape = match self.row_len {
            1 => format!("({rows},)"),
            row_len => format!("({rows}, {row_len})"),
        };
        let mut text = format!(
            "{{'descr': '{}', 'fortran_order': False, 'shape': {shape}, }}",
            self.of.descr()
        );
        text.push_str(&" ".repeat(GROWTH_DIGITS.saturating_sub(rows.len())));
        let mut header = b"\x93NUMPY\x01\x00".to_vec();
        let unaligned = header.len() + 2 + text.len() + 1;
        text.push_str(&" ".repeat(unaligned.next_multiple_of(ALIGNMENT) - unaligned));
        text.push('\n');
        // The text has about 120 bytes.
        header.extend((text.len() as u16).to_le_bytes());
        header.extend(text.as_bytes());
        header
    }
}

/// An array that is being written.
#[derive(Debug)]
pub(crate) struct NpyWriter {
    path: PathBuf,
    out: AppendFile,
    shape: NpyShape,
    count: u64,
}

impl NpyWriter {
    /// Creates the file, or empties it.
    pub(crate) fn create(path: PathBuf, shape: NpyShape) -> Result<Self, DataError> {
        let mut out = AppendFile::open(path.clone(), 0)?;
        out.append(&shape.header(shape.rows.unwrap_or(0)))?;
        Ok(Self {
            path,
            out,
            shape,
            count: 0,
        })
    }

    /// Adds a number, which must be in the range of the type.
    pub(crate) fn push(&mut self, number: i64) -> Result<(), DataError> {
        self.count += 1;
        let size = self.shape.of.size();
        self.out.append(&number.to_le_bytes()[..size])
    }

    /// Writes everything to the disk.
    pub(crate) fn finish(mut self) -> Result<(), DataError> {
        let rows = self.shape.rows.unwrap_or(self.count / self.shape.row_len);
        let expected = rows.saturating_mul(self.shape.row_len);
        if self.count != expected {
            let why = format!("{} of {expected} numbers were computed", self.count);
            return Err(DataError::BadOrder {
                path: self.path,
                why,
            });
        }
        if self.shape.rows.is_none() {
            self.out.replace_start(&self.shape.header(rows))?;
        }
        self.out.sync()
    }
}

/// A file as it was found.
#[derive(Debug)]
pub(crate) enum OpenedNpy {
    Array(NpyFile),
    Missing,
    /// It is not such an array; the text says why.
    Other(String),
}

/// An array on disk, whose numbers are read on demand.
#[derive(Debug)]
pub(crate) struct NpyFile {
    path: PathBuf,
    file: File,
    of: NpyType,
    rows: u64,
    /// Number of numbers.
    count: u64,
    /// Bytes of the header.
    begin: u64,
}

impl NpyFile {
    /// Opens a file, whose header and size must be those of an array of this shape.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub(crate) fn open(path: &Path, shape: NpyShape) -> Result<OpenedNpy, DataError> {
        let unreadable = |source| DataError::Io {
            path: path.into(),
            source,
        };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(OpenedNpy::Missing),
            Err(error) => return Err(unreadable(error)),
        };
        let found = file.metadata().map_err(unreadable)?.len();
        let begin = shape.header(0).len() as u64;
        let rows = shape
            .rows
            .unwrap_or(found.saturating_sub(begin) / shape.row_bytes());
        let expected = shape.header(rows);
        let mut header = vec![0; expected.len()];
        match file.read_exact_at(&mut header, 0) {
            Err(error) if error.kind() != ErrorKind::UnexpectedEof => {
                return Err(unreadable(error));
            }
            Ok(()) if header == expected => {}
            _ => return Ok(OpenedNpy::Other("it does not begin with its header".into())),
        }
        let size = begin.saturating_add(rows.saturating_mul(shape.row_bytes()));
        if found != size {
            let why = format!("it has {found} bytes instead of {size}");
            return Ok(OpenedNpy::Other(why));
        }
        Ok(OpenedNpy::Array(Self {
            path: path.into(),
            file,
            of: shape.of,
            rows,
            count: rows * shape.row_len,
            begin,
        }))
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// `count` numbers from number `first` on.
    ///
    /// # Errors
    /// The file does not have them, or cannot be read.
    pub(crate) fn numbers(&self, first: u64, count: usize) -> Result<Vec<i64>, DataError> {
        let size = self.of.size();
        let mut bytes = vec![0; count * size];
        let read = match first.checked_add(count as u64) {
            Some(end) if end <= self.count => {
                let at = self.begin + first * size as u64;
                self.file.read_exact_at(&mut bytes, at)
            }
            _ => Err(io::Error::new(ErrorKind::UnexpectedEof, "it ends before")),
        };
        read.map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => self.damaged(format!("it has no number {first}")),
            _ => DataError::Io {
                path: self.path.clone(),
                source,
            },
        })?;
        let numbers = bytes.chunks_exact(size);
        Ok(numbers.map(|bytes| self.of.number(bytes)).collect())
    }

    /// The error of a number that cannot be.
    pub(crate) fn damaged(&self, why: String) -> DataError {
        let path = self.path.clone();
        DataError::BadOrder { path, why }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn numbers_come_back(#[values(true, false)] knows_rows: bool) {
        let dir = tempfile::tempdir().unwrap();
        let numbers = |of| match of {
            NpyType::I16 => vec![0, -3, 32_766],
            NpyType::I32 => vec![7, -70_000],
            NpyType::U32 => vec![0, 4_294_967_293],
            NpyType::I64 => vec![1 << 40, 5, -1, 4_294_967_296],
            NpyType::U64 => vec![1 << 40, 0, 5, i64::MAX, 4_294_967_296, 2],
        };
        let types = [
            (NpyType::I16, 1),
            (NpyType::I32, 2),
            (NpyType::U32, 2),
            (NpyType::I64, 2),
            (NpyType::U64, 3),
        ];
        for (of, row_len) in types {
            let expected = numbers(of);
            let num_rows = expected.len() as u64 / row_len;
            let rows = knows_rows.then_some(num_rows);
            let shape = NpyShape { of, rows, row_len };
            let path = dir.path().join(of.descr());
            let mut writer = NpyWriter::create(path.clone(), shape).unwrap();
            expected.iter().for_each(|n| writer.push(*n).unwrap());
            writer.finish().unwrap();
            for rows in [None, Some(num_rows)] {
                let shape = NpyShape { rows, ..shape };
                let OpenedNpy::Array(file) = NpyFile::open(&path, shape).unwrap() else {
                    panic!("{} is not opened", path.display());
                };
                assert_eq!(file.rows(), num_rows);
                assert_eq!(file.numbers(0, expected.len()).unwrap(), expected);
                assert_eq!(file.numbers(1, 1).unwrap(), expected[1..2]);
                let error = file.numbers(expected.len() as u64, 1).unwrap_err();
                assert!(error.to_string().contains("it has no number"), "{error}");
            }
            let written = std::fs::read(&path).unwrap();
            for len in 0..written.len() {
                std::fs::write(&path, &written[..len]).unwrap();
                let opened = NpyFile::open(
                    &path,
                    NpyShape {
                        rows: None,
                        ..shape
                    },
                );
                assert!(matches!(opened.unwrap(), OpenedNpy::Other(_)), "{len}");
            }
        }
    }

    #[rstest]
    #[case(Some(3), 1, "1 of 3 numbers were computed")]
    #[case(None, 3, "3 of 2 numbers were computed")]
    fn an_array_that_is_not_complete_is_refused(
        #[case] rows: Option<u64>,
        #[case] num_pushed: i64,
        #[case] why: &str,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let shape = NpyShape {
            of: NpyType::I32,
            rows,
            row_len: if rows.is_none() { 2 } else { 1 },
        };
        let mut writer = NpyWriter::create(dir.path().join("a"), shape).unwrap();
        (0..num_pushed).for_each(|n| writer.push(n).unwrap());
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

//! Reads the records of all files, from any position on, in batches.

use std::io::{self, BufRead};
use std::ops::ControlFlow;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::{Deserialize, Serialize, de::IgnoredAny};

use super::{
    array::{ArrayError, Elements},
    inputs::{InputFile, Kind},
    long_text::{LongText, not_utf8},
    unpack,
};
use crate::{error::DataError, tokenizer::PieceEncoder};

/// A place between two records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Position {
    /// The number of the file.
    pub(super) file: usize,
    /// Bytes of the text of this file that were read; 0 in an array.
    pub(super) bytes: u64,
    /// Lines, elements or pieces of this file that were read.
    pub(super) records: u64,
}

/// Something that holds at most one document, or a piece of one.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) file: usize,
    /// The number of its line, element or piece from 1 on.
    pub(super) number: u64,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    /// A line of JSON, without its end.
    Line(Vec<u8>),
    /// An element of a JSON array.
    Element(Vec<u8>),
    /// A document.
    Text(Vec<u8>),
    /// A piece of a document that is too long for memory.
    Piece(Piece),
    /// A document that is not UTF-8, with the reason.
    NotUtf8(String),
    /// The texts of a row, one for each key; `None` for null.
    #[cfg(feature = "parquet")]
    Row(Vec<Option<Vec<u8>>>),
}

/// A piece of a document.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) is_first: bool,
    pub(super) is_last: bool,
}

impl Content {
    /// The texts, or one that has them.
    pub(super) fn texts(&self) -> Vec<&[u8]> {
        match self {
            Self::Line(bytes) | Self::Element(bytes) | Self::Text(bytes) => vec![bytes],
            Self::Piece(piece) => vec![piece.text.as_bytes()],
            Self::NotUtf8(_) => Vec::new(),
            #[cfg(feature = "parquet")]
            Self::Row(texts) => texts.iter().flatten().map(Vec::as_slice).collect(),
        }
    }
}

/// Records that follow each other.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) records: Vec<Record>,
    /// The place after them.
    pub(super) end: Position,
    /// Bytes of all files up to there, approximately.
    pub(super) read_bytes: u64,
    /// Bytes of text.
    pub(super) num_bytes: usize,
}

/// Gives batches of at least `batch_bytes` bytes of text to `emit`, until it breaks. Of tables the
/// columns `keys` are read. Texts are cut into pieces where `pieces` can, if it is given.
///
/// # Errors
/// A file cannot be read, or its array is not valid JSON.
pub(super) fn read_batches(
    files: &[InputFile],
    keys: &[String],
    pieces: Option<&dyn PieceEncoder>,
    start: Position,
    batch_bytes: usize,
    emit: &mut dyn FnMut(Batch) -> ControlFlow<()>,
) -> Result<(), DataError> {
    let mut reader = Reader {
        batch: Batch::default(),
        keys,
        pieces,
        batch_bytes,
        before: 0,
        read: Arc::default(),
        emit,
    };
    for (index, file) in files.iter().enumerate() {
        if index >= start.file {
            let first = if index == start.file {
                start
            } else {
                Position {
                    file: index,
                    ..Position::default()
                }
            };
            if reader.file(file, first)?.is_break() {
                return Ok(());
            }
        }
        reader.before += file.num_bytes;
        reader.read.store(0, Relaxed);
        reader.batch.end = Position {
            file: index + 1,
            ..Position::default()
        };
    }
    // Also without records, so that the end of the last file is known.
    let _ = reader.flush();
    Ok(())
}

struct Reader<'a> {
    batch: Batch,
    #[cfg_attr(not(feature = "parquet"), expect(dead_code))]
    keys: &'a [String],
    pieces: Option<&'a dyn PieceEncoder>,
    batch_bytes: usize,
    /// Bytes of the files before this one.
    before: u64,
    /// Bytes of this file that were read.
    read: Arc<AtomicU64>,
    emit: &'a mut dyn FnMut(Batch) -> ControlFlow<()>,
}

impl Reader<'_> {
    fn file(&mut self, file: &InputFile, first: Position) -> Result<ControlFlow<()>, DataError> {
        let failed = |source: io::Error| DataError::Io {
            path: file.path.clone(),
            source,
        };
        match file.kind {
            Kind::Text => self.text(file, first),
            Kind::Lines => self.lines(file, first).map_err(failed),
            Kind::Json => match self.first_byte(file).map_err(failed)? {
                Some(b'[') => self.elements(file, first),
                _ if self.has_long_object(file).map_err(failed)? => {
                    let path = file.path.clone();
                    Err(DataError::LongObject { path })
                }
                _ => self.lines(file, first).map_err(failed),
            },
            #[cfg(feature = "parquet")]
            Kind::Parquet => self.rows(file, first),
            #[cfg(not(feature = "parquet"))]
            Kind::Parquet => {
                let path = file.path.clone();
                Err(DataError::NoParquet { path })
            }
        }
    }

    /// A text as one document, or as pieces of it if it is long.
    fn text(&mut self, file: &InputFile, first: Position) -> Result<ControlFlow<()>, DataError> {
        let failed = |source: io::Error| DataError::Io {
            path: file.path.clone(),
            source,
        };
        let file_end = Position {
            file: first.file + 1,
            ..Position::default()
        };
        let mut reader = self.open(file, first.bytes).map_err(failed)?;
        let Some(pieces) = self.pieces else {
            let mut text = Vec::new();
            reader.read_to_end(&mut text).map_err(failed)?;
            let size = text.len();
            return Ok(self.push(first.file, 1, Content::Text(text), size, file_end));
        };
        let mut text = LongText::new(&mut reader, pieces, self.batch_bytes);
        if first.bytes == 0 {
            if let Some(text) = text.whole().map_err(failed)? {
                let size = text.len();
                return Ok(self.push(first.file, 1, Content::Text(text), size, file_end));
            }
            // A piece cannot be taken back, so the whole text is checked before the first one.
            let num_read = self.read.load(Relaxed);
            let mut whole = self.open(file, 0).map_err(failed)?;
            let checked = not_utf8(&mut whole).map_err(failed)?;
            if let Some(why) = checked {
                return Ok(self.push(first.file, 1, Content::NotUtf8(why), 0, file_end));
            }
            self.read.store(num_read, Relaxed);
        }
        let mut end = first;
        loop {
            let (piece, is_last) = text.next(&file.path)?;
            let is_first = end.bytes == 0;
            let size = piece.len();
            end.bytes += size as u64;
            end.records += 1;
            let content = Content::Piece(Piece {
                text: piece,
                is_first,
                is_last,
            });
            let place = if is_last { file_end } else { end };
            let pushed = self.push(first.file, end.records, content, size, place);
            if is_last || pushed.is_break() {
                return Ok(pushed);
            }
        }
    }

    #[cfg(feature = "parquet")]
    fn rows(&mut self, file: &InputFile, first: Position) -> Result<ControlFlow<()>, DataError> {
        let keys = self.keys;
        super::parquet::read(&file.path, keys, first.records, |number, part, row| {
            let read_bytes = part * file.num_bytes as f64;
            self.read.store(read_bytes as u64, Relaxed);
            let end = Position {
                records: number,
                ..first
            };
            let size = row.iter().flatten().map(Vec::len).sum();
            self.push(first.file, number, Content::Row(row), size, end)
        })
    }

    fn lines(&mut self, file: &InputFile, first: Position) -> io::Result<ControlFlow<()>> {
        let mut reader = self.open(file, first.bytes)?;
        let mut end = first;
        loop {
            let mut line = Vec::new();
            let size = reader.read_until(b'\n', &mut line)?;
            if size == 0 {
                return Ok(ControlFlow::Continue(()));
            }
            end.bytes += size as u64;
            end.records += 1;
            if line.trim_ascii().is_empty() {
                continue;
            }
            let content = Content::Line(line);
            if self
                .push(first.file, end.records, content, size, end)
                .is_break()
            {
                return Ok(ControlFlow::Break(()));
            }
        }
    }

    fn elements(
        &mut self,
        file: &InputFile,
        first: Position,
    ) -> Result<ControlFlow<()>, DataError> {
        let failed = |error: ArrayError| match error {
            ArrayError::Io(source) => DataError::Io {
                path: file.path.clone(),
                source,
            },
            ArrayError::Bad(why) => DataError::BadArray {
                path: file.path.clone(),
                why,
            },
        };
        let reader = self.open(file, 0).map_err(|source| failed(source.into()))?;
        let mut elements = Elements::begin(reader).map_err(failed)?;
        let mut end = first;
        let mut seen = 0;
        while let Some(element) = elements.next().map_err(failed)? {
            seen += 1;
            if seen <= first.records {
                continue;
            }
            end.records = seen;
            let size = element.len();
            let content = Content::Element(element);
            if self.push(first.file, seen, content, size, end).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// The first byte of the text after whitespace.
    fn first_byte(&self, file: &InputFile) -> io::Result<Option<u8>> {
        let mut reader = self.open(file, 0)?;
        loop {
            let bytes = reader.fill_buf()?;
            let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
            if bytes.is_empty() || first.is_some() {
                return Ok(first.copied());
            }
            let count = bytes.len();
            reader.consume(count);
        }
    }

    /// Whether the first line that is not blank begins an object that the next such line continues,
    /// as a pretty-printed one. A line that was cut is followed by another object.
    fn has_long_object(&self, file: &InputFile) -> io::Result<bool> {
        let mut reader = self.open(file, 0)?;
        let mut line = || {
            let mut line = Vec::new();
            while line.trim_ascii().is_empty() {
                line.clear();
                if reader.read_until(b'\n', &mut line)? == 0 {
                    break;
                }
            }
            Ok::<_, io::Error>(line)
        };
        let is_open = match serde_json::from_slice::<IgnoredAny>(&line()?) {
            Ok(_) => false,
            Err(error) => error.is_eof(),
        };
        Ok(is_open && !matches!(line()?.trim_ascii_start().first(), None | Some(b'{')))
    }

    fn open(&self, file: &InputFile, skip: u64) -> io::Result<Box<dyn BufRead>> {
        unpack::open(&file.path, file.packing, skip, &self.read)
    }

    /// Adds a record of `size` bytes, after which the position is `end`.
    fn push(
        &mut self,
        file: usize,
        number: u64,
        content: Content,
        size: usize,
        end: Position,
    ) -> ControlFlow<()> {
        self.batch.records.push(Record {
            file,
            number,
            content,
        });
        self.batch.end = end;
        self.batch.num_bytes += size;
        if self.batch.num_bytes < self.batch_bytes {
            return ControlFlow::Continue(());
        }
        self.flush()
    }

    fn flush(&mut self) -> ControlFlow<()> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.read_bytes = self.before + self.read.load(Relaxed);
        self.batch.end = batch.end;
        (self.emit)(batch)
    }
}

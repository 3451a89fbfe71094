//! One data set of a [`Part`](super::Part) while it is written.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::{
    disk::{self, AppendFile},
    owned::{hash_of, hex},
};
use crate::{
    error::DataError,
    indexed::{Header, TokenType, i32s, i64s, write_index},
};

/// The files of an output in the folder: tokens, lengths of sequences, ends of documents, index,
/// description.
const FILES: [&str; 5] = ["bin", "lengths", "documents", "idx", "megaburn"];

/// A data set to which documents are added.
#[derive(Debug)]
pub(crate) struct Output {
    prefix: PathBuf,
    /// Its files in the folder without their endings.
    stem: PathBuf,
    token_type: TokenType,
    bin: AppendFile,
    lengths: AppendFile,
    documents: AppendFile,
}

impl Output {
    /// Opens the files of a data set and cuts them to what was saved.
    pub(super) fn open(
        prefix: PathBuf,
        stem: PathBuf,
        token_type: TokenType,
        saved: Option<&Value>,
    ) -> Result<Self, DataError> {
        let count = |name: &str| saved.and_then(|saved| saved[name].as_u64()).unwrap_or(0);
        let file = |ending: &str, keep: u64| AppendFile::open(stem.with_extension(ending), keep);
        Ok(Self {
            bin: file("bin", count("bytes"))?,
            lengths: file("lengths", 4 * count("sequences"))?,
            documents: file("documents", 8 * count("documents"))?,
            prefix,
            stem,
            token_type,
        })
    }

    /// Whether a file of the folder has the name of one of these files.
    pub(super) fn is_name(name: &OsStr) -> bool {
        let path = Path::new(name);
        let is_number = |stem: &OsStr| stem.to_str().is_some_and(|s| s.parse::<usize>().is_ok());
        let ending = path.extension().and_then(OsStr::to_str);
        path.file_stem().is_some_and(is_number) && ending.is_some_and(|e| FILES.contains(&e))
    }

    /// Adds a document whose sequences have these lengths.
    pub(crate) fn add_document(&mut self, bytes: &[u8], lengths: &[i32]) -> Result<(), DataError> {
        self.add_tokens(bytes)?;
        for length in lengths {
            self.add_length(*length)?;
        }
        self.end_document(self.num_sequences())
    }

    /// Adds tokens, whose sequences and documents are added on their own.
    pub(crate) fn add_tokens(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.bin.append(bytes)
    }

    /// Adds the length of the next sequence.
    pub(crate) fn add_length(&mut self, length: i32) -> Result<(), DataError> {
        self.lengths.append(&length.to_le_bytes())
    }

    /// Ends a document after a number of sequences of the data set.
    pub(crate) fn end_document(&mut self, num_sequences: u64) -> Result<(), DataError> {
        self.documents.append(&num_sequences.to_le_bytes())
    }

    /// The path of the data set without endings.
    pub(crate) fn prefix(&self) -> &Path {
        &self.prefix
    }

    pub(super) fn stem(&self) -> &Path {
        &self.stem
    }

    pub(crate) fn num_documents(&self) -> u64 {
        self.documents.num_bytes() / 8
    }

    pub(crate) fn num_sequences(&self) -> u64 {
        self.lengths.num_bytes() / 4
    }

    /// What the journal needs to continue.
    pub(super) fn counts(&self) -> Value {
        json!({
            "bytes": self.bin.num_bytes(),
            "sequences": self.num_sequences(),
            "documents": self.num_documents(),
        })
    }

    pub(super) fn sync(&mut self) -> Result<(), DataError> {
        self.bin.sync()?;
        self.lengths.sync()?;
        self.documents.sync()
    }

    /// Writes the index of the documents so far, and returns its hash.
    pub(super) fn write_index(&self) -> Result<u64, DataError> {
        let header = Header {
            token_type: self.token_type,
            num_sequences: self.num_sequences(),
            num_documents: self.num_documents(),
        };
        let open = |ending: &str| {
            let file = File::open(self.stem.with_extension(ending))?;
            Ok::<_, io::Error>(BufReader::with_capacity(1 << 18, file))
        };
        let mut hash = Xxh3::new();
        disk::write_file(&self.stem.with_extension("idx"), |out| {
            let mut out = Hashing(out, &mut hash);
            let lengths = || Ok(i32s(open("lengths")?, header.num_sequences));
            let documents = i64s(open("documents")?, header.num_documents);
            write_index(&mut out, header, lengths, documents)
        })?;
        Ok(hash.digest())
    }

    /// Writes the file that shows later processes that megaburn wrote the data set.
    pub(super) fn write_description(&self, description: Value, hash: u64) -> Result<(), DataError> {
        let mut description = description;
        description["written_by"] = concat!("megaburn ", env!("CARGO_PKG_VERSION")).into();
        description["index_xxh3"] = hex(hash).into();
        let bin = self.stem.with_extension("bin");
        let found = hash_of(&bin).map_err(|source| DataError::Io {
            path: bin.clone(),
            source,
        })?;
        description["bin_bytes"] = self.bin.num_bytes().into();
        description["bin_xxh3"] = hex(found).into();
        let text = format!("{description:#}\n");
        let path = self.stem.with_extension("megaburn");
        disk::write_file(&path, |out| out.write_all(text.as_bytes()))
    }
}

/// Hashes what passes through it.
struct Hashing<'a, W>(W, &'a mut Xxh3);

impl<W: Write> Write for Hashing<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.0.write(bytes)?;
        self.1.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Value, json};

use super::{Header, TokenType, bytes::read_error, files::Files, i32s, i64s};
use crate::{
    error::DataError,
    part::{hash_from, hex},
    remote::ObjectStoreConfig,
};

/// An indexed data set on disk or in an object store. Its tokens are read on demand, so memory does
/// not grow with them.
#[derive(Debug)]
pub struct IndexedDataset {
    files: Files,
    header: Header,
    index_hash: OnceLock<u64>,
}

/// Where the tokens of a sequence are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequencePlace {
    /// The sequence.
    sequence: u64,
    /// Bytes of tokens before it.
    begin: u64,
    /// Number of tokens before it.
    pub(crate) first_token: u64,
    /// Number of its tokens.
    pub(crate) num_tokens: u64,
}

/// The size of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentSize {
    /// Number of tokens in all of its sequences.
    pub num_tokens: u64,
    /// Number of sequences: one, except for an empty document and for texts that are lists of
    /// sentences.
    pub num_sequences: u64,
}

impl IndexedDataset {
    /// Opens `PREFIX.bin` and `PREFIX.idx`. The prefix may also be the path of one of the two, or a
    /// URL (`s3://`, `gs://`, `http://`, `https://`, `file://`) in builds with the feature
    /// `object-store`. Their sizes are compared; [`Self::check`] reads the whole index.
    ///
    /// # Errors
    /// A file is missing or cannot be read, the index is damaged, or the two files do not belong
    /// together.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::open_with(prefix, &ObjectStoreConfig::new())
    }

    /// The same, with a configuration for URLs.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        prefix: impl AsRef<Path>,
        config: &ObjectStoreConfig,
    ) -> Result<Self, DataError> {
        let files = Files::open(prefix.as_ref(), config)?;
        let idx_bytes = files.idx_bytes;
        let header = Header::read(&files.idx_name(), &mut files.idx_section(0, idx_bytes))?;
        let set = Self {
            files,
            header,
            index_hash: OnceLock::new(),
        };
        if idx_bytes != header.num_bytes() {
            let expected = header.num_bytes();
            let why = if idx_bytes == expected + header.num_sequences {
                "it has modes of sequences, which multimodal data has; only text is supported"
                    .into()
            } else {
                format!("it has {idx_bytes} bytes, and its header says {expected}")
            };
            return Err(set.bad(why));
        }
        set.check_ends()?;
        Ok(set)
    }

    /// Compares the first and last entries of the index with its counts and the size of the tokens.
    fn check_ends(&self) -> Result<(), DataError> {
        let header = &self.header;
        let mut tokens_end = 0;
        if let Some(last) = header.num_sequences.checked_sub(1) {
            let length = self.entry::<4>(header.lengths_at() + 4 * last)?;
            let pointer = self.entry::<8>(header.pointers_at() + 8 * last)?;
            let length = i64::from(i32::from_le_bytes(length));
            tokens_end = i64::from_le_bytes(pointer)
                .saturating_add(length * header.token_type.size() as i64);
        }
        let first = i64::from_le_bytes(self.entry(header.documents_at())?);
        let end = header.documents_at() + 8 * header.num_documents;
        let end = i64::from_le_bytes(self.entry(end)?);
        if first != 0 || end != header.num_sequences as i64 {
            return Err(self.bad(format!(
                "its documents are the sequences {first} to {end} of {}",
                header.num_sequences
            )));
        }
        if u64::try_from(tokens_end) != Ok(self.files.bin_bytes) {
            return Err(DataError::OtherIndex {
                bin: self.files.bin_name(),
                found: self.files.bin_bytes,
                expected: tokens_end,
            });
        }
        Ok(())
    }

    /// Reads the whole index and compares every entry with those before it.
    ///
    /// # Errors
    /// A length is negative, a sequence does not begin where the one before it ends, or a document
    /// ends before it begins.
    pub fn check(&self) -> Result<(), DataError> {
        let header = &self.header;
        let mut next = 0i64;
        let pointers = i64s(
            self.section(header.pointers_at(), header.documents_at()),
            header.num_sequences,
        );
        for (index, (length, pointer)) in self.lengths().zip(pointers).enumerate() {
            let (length, pointer) = (length?, self.read(pointer)?);
            if length < 0 || pointer != next {
                return Err(self.bad(format!(
                    "sequence {index} has length {length} and begins at byte {pointer}, but the \
                     one before it ends at byte {next}"
                )));
            }
            next += i64::from(length) * header.token_type.size() as i64;
        }
        let mut last = 0;
        for (index, end) in self.document_ends().enumerate() {
            let end = end?;
            if end < last || end > header.num_sequences as i64 {
                return Err(self.bad(format!(
                    "document {index} is the sequences {last} to {end} of {}",
                    header.num_sequences
                )));
            }
            last = end;
        }
        Ok(())
    }

    /// The path or URL without `.bin` and `.idx`.
    pub fn prefix(&self) -> &Path {
        &self.files.prefix
    }

    /// Number of documents.
    pub fn num_documents(&self) -> u64 {
        self.header.num_documents
    }

    /// Number of sequences.
    pub fn num_sequences(&self) -> u64 {
        self.header.num_sequences
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> u64 {
        self.files.bin_bytes / self.token_type().size()
    }

    /// The integer type of the tokens.
    pub fn token_type(&self) -> TokenType {
        self.header.token_type
    }

    /// What megaburn wrote next to the data set: the command, its inputs and the tokenizer. `None`
    /// if another program wrote the data set, or it was changed since.
    pub fn description(&self) -> Option<Value> {
        self.files.description(self.index_hash().ok()?)
    }

    /// Number of bytes of text that were encoded; `None` if it is not known.
    pub(crate) fn num_text_bytes(&self) -> Option<u64> {
        self.description()?["text_bytes"].as_u64()
    }

    /// What changes if the data set is written again: its path, size, time and index.
    pub(crate) fn identity(&self) -> Result<Value, DataError> {
        let modified = self.files.bin.version();
        let modified = modified.map_err(|source| read_error(self.files.bin_name(), source))?;
        Ok(json!({
            "path": self.prefix().display().to_string(),
            "size": self.files.bin_bytes,
            "modified": modified,
            "index_xxh3": hex(self.read(self.files.hash_of_idx())?),
        }))
    }

    /// The hash of the index, which is read for it the first time.
    pub(crate) fn index_hash(&self) -> Result<u64, DataError> {
        if let Some(hash) = self.index_hash.get() {
            return Ok(*hash);
        }
        let hash = self.read(hash_from(self.section(0, self.header.num_bytes())))?;
        Ok(*self.index_hash.get_or_init(|| hash))
    }

    /// The sizes of all documents, in order.
    pub fn document_sizes(&self) -> impl Iterator<Item = Result<DocumentSize, DataError>> + '_ {
        let mut lengths = self.lengths();
        let mut begin = 0;
        self.document_ends().map(move |end| {
            let end = end?;
            let count = end
                .checked_sub(begin)
                .and_then(|count| u64::try_from(count).ok());
            let num_sequences = count
                .ok_or_else(|| self.bad(format!("a document ends at {end}, before {begin}")))?;
            begin = end;
            let mut num_tokens = 0;
            for _ in 0..num_sequences {
                let length = lengths.next().transpose()?;
                let length = length.and_then(|length| u64::try_from(length).ok());
                num_tokens += length.ok_or_else(|| self.bad("a length is missing".into()))?;
            }
            Ok(DocumentSize {
                num_tokens,
                num_sequences,
            })
        })
    }

    /// The tokens of each sequence of a document.
    ///
    /// # Errors
    /// There is no such document, or the files cannot be read.
    pub fn document(&self, index: u64) -> Result<Vec<Vec<i64>>, DataError> {
        let num_documents = self.num_documents();
        if index >= num_documents {
            return Err(DataError::NoDocument {
                prefix: self.prefix().into(),
                index,
                num_documents,
            });
        }
        let end = self.sequences_before(index + 1)?;
        (self.sequences_before(index)?..end)
            .map(|sequence| {
                let place = self.sequence_place(sequence)?;
                self.tokens(&place, 0..place.num_tokens)
            })
            .collect()
    }

    /// Where a sequence is, which must be below the number of sequences.
    ///
    /// # Errors
    /// The index cannot be read, or the sequence is outside of the tokens.
    pub(crate) fn sequence_place(&self, sequence: u64) -> Result<SequencePlace, DataError> {
        let length = self.entry(self.header.lengths_at() + 4 * sequence)?;
        let num_tokens = u64::try_from(i32::from_le_bytes(length)).unwrap_or(0);
        let begin = self.bytes_before(sequence)?;
        let size = self.token_type().size();
        let end = begin.checked_add(num_tokens * size);
        if end.is_none_or(|end| end > self.files.bin_bytes) {
            return Err(self.bad(format!("sequence {sequence} is outside of the tokens")));
        }
        Ok(SequencePlace {
            sequence,
            begin,
            first_token: begin / size,
            num_tokens,
        })
    }

    /// The tokens `wanted` of a sequence, numbered from 0.
    ///
    /// # Errors
    /// The sequence does not have them, or they cannot be read.
    pub(crate) fn tokens(
        &self,
        place: &SequencePlace,
        wanted: Range<u64>,
    ) -> Result<Vec<i64>, DataError> {
        let size = self.token_type().size();
        let count = wanted.end.checked_sub(wanted.start);
        let Some(count) = count.filter(|_| wanted.end <= place.num_tokens) else {
            let sequence = place.sequence;
            return Err(self.bad(format!("sequence {sequence} has no tokens {wanted:?}")));
        };
        let mut bytes = vec![0; (count * size) as usize];
        let at = place.begin + wanted.start * size;
        let read = self.files.bin.read_exact_at(&mut bytes, at);
        read.map_err(|source| read_error(self.files.bin_name(), source))?;
        Ok(self.token_type().tokens_of(&bytes))
    }

    /// Number of sequences before a document; of all for the number of documents.
    pub(crate) fn sequences_before(&self, document: u64) -> Result<u64, DataError> {
        let at = self.header.documents_at() + 8 * document;
        let before = i64::from_le_bytes(self.entry(at)?);
        let in_range = u64::try_from(before).ok();
        in_range
            .filter(|before| *before <= self.num_sequences())
            .ok_or_else(|| self.bad(format!("document {document} begins at sequence {before}")))
    }

    /// Number of bytes of tokens before a sequence; of all for the number of sequences.
    pub(crate) fn bytes_before(&self, sequence: u64) -> Result<u64, DataError> {
        if sequence == self.num_sequences() {
            return Ok(self.files.bin_bytes);
        }
        let pointer = self.entry(self.header.pointers_at() + 8 * sequence)?;
        let pointer = i64::from_le_bytes(pointer);
        u64::try_from(pointer)
            .map_err(|_| self.bad(format!("sequence {sequence} begins at byte {pointer}")))
    }

    /// The lengths of all sequences.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = Result<i32, DataError>> + '_ {
        self.lengths_from(0)
    }

    /// The lengths of the sequences from one on.
    pub(crate) fn lengths_from(
        &self,
        first: u64,
    ) -> impl Iterator<Item = Result<i32, DataError>> + '_ {
        let header = &self.header;
        let section = self.section(header.lengths_at() + 4 * first, header.pointers_at());
        i32s(section, header.num_sequences - first).map(|length| self.read(length))
    }

    /// The number of sequences up to the end of each document.
    pub(crate) fn document_ends(&self) -> impl Iterator<Item = Result<i64, DataError>> + '_ {
        self.document_ends_from(0)
    }

    /// The same from a document on.
    pub(crate) fn document_ends_from(
        &self,
        first: u64,
    ) -> impl Iterator<Item = Result<i64, DataError>> + '_ {
        let header = &self.header;
        let begin = header.documents_at() + 8 * (first + 1);
        let section = self.section(begin, header.num_bytes());
        i64s(section, header.num_documents - first).map(|end| self.read(end))
    }

    /// Bytes `begin..end` of the tokens.
    pub(crate) fn token_bytes(&self, begin: u64, end: u64) -> impl Read + '_ {
        self.files.bin_section(begin, end)
    }

    fn section(&self, begin: u64, end: u64) -> impl Read + '_ {
        BufReader::with_capacity(1 << 16, self.files.idx_section(begin, end))
    }

    fn entry<const N: usize>(&self, at: u64) -> Result<[u8; N], DataError> {
        let mut bytes = [0; N];
        self.read(self.files.idx.read_exact_at(&mut bytes, at))?;
        Ok(bytes)
    }

    fn read<T>(&self, read: io::Result<T>) -> Result<T, DataError> {
        read.map_err(|source| read_error(self.files.idx_name(), source))
    }

    /// The error of an index that is damaged.
    pub(crate) fn bad(&self, why: String) -> DataError {
        let path = self.files.idx_name();
        DataError::BadIndex { path, why }
    }
}

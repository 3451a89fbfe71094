//! Documents that are cut into chunks, and chunks sorted by length.

use std::ops::Range;

use super::stats::PackingStats;
use crate::{dataset::TokenDataset, error::DataError, index_cache::reserved};

/// The most chunks of a data set: they are numbered by 32 bits, of which one number ends a chain.
const MOST_CHUNKS: u64 = u32::MAX as u64;

/// A document, or the part of a long document that is in one bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The position of its first token in the data set.
    pub(super) first_token: u64,
    /// Number of labels, from 1 to the sequence length. There is one token more.
    pub(super) num_labels: u32,
}

/// The chunks of a document, which overlap by one token, so that every token but the first one is a
/// label once. A document of one token or none has no chunk.
pub(super) fn chunks_of(document: Range<u64>, seq_len: u32) -> impl Iterator<Item = Chunk> {
    let last = document.end.saturating_sub(1).max(document.start);
    let firsts = (document.start..last).step_by(seq_len as usize);
    firsts.map(move |first_token| Chunk {
        first_token,
        num_labels: u64::from(seq_len).min(last - first_token) as u32,
    })
}

/// The chunks of all documents, the longest first, and those of equal length in the order of the
/// data set. They take 8 bytes each.
#[derive(Debug)]
pub(super) struct SortedChunks {
    first_tokens: Vec<u64>,
    /// The number of labels of the longest chunk.
    longest: u32,
    /// Entry `i` is the number of chunks with more than `longest - i` labels.
    begins: Vec<u32>,
}

impl SortedChunks {
    /// Cuts the documents of a data set and sorts the chunks by counting. Its documents are read
    /// twice. The statistics lack the number of samples.
    ///
    /// # Errors
    /// The index of the data set cannot be read; there is not enough memory; there are more chunks
    /// than 32 bits number.
    pub(super) fn new(
        dataset: &TokenDataset,
        seq_len: u32,
    ) -> Result<(Self, PackingStats), DataError> {
        // No chunk has more labels than this.
        let longest = u64::from(seq_len).min(dataset.num_tokens()) as u32;
        let mut counts = reserved::<u64>(u64::from(longest) + 1)?;
        counts.resize(longest as usize + 1, 0);
        let mut stats = PackingStats {
            seq_len: seq_len.into(),
            ..PackingStats::default()
        };
        let mut num_chunks = 0u64;
        for document in dataset.documents() {
            let document = document?;
            stats.count(&document);
            for chunk in chunks_of(document, seq_len) {
                counts[(longest - chunk.num_labels) as usize] += 1;
                num_chunks += 1;
                if num_chunks > MOST_CHUNKS {
                    return Err(DataError::OrderSize {
                        why: format!(
                            "{} has more than the {MOST_CHUNKS} documents and parts of documents \
                             that can be packed; divide it",
                            dataset.name()
                        ),
                    });
                }
            }
        }
        let mut end = 0;
        let begins = counts.into_iter().map(|count| {
            let begin = end;
            end += count as u32;
            begin
        });
        let begins: Vec<u32> = begins.collect();
        let mut next = begins.clone();
        let mut first_tokens = reserved(num_chunks)?;
        first_tokens.resize(num_chunks as usize, 0);
        for document in dataset.documents() {
            for chunk in chunks_of(document?, seq_len) {
                let at = &mut next[(longest - chunk.num_labels) as usize];
                let place = first_tokens.get_mut(*at as usize);
                *place.ok_or_else(|| changed(dataset))? = chunk.first_token;
                *at += 1;
            }
        }
        if next[..longest as usize] != begins[1..] {
            return Err(changed(dataset));
        }
        let chunks = Self {
            first_tokens,
            longest,
            begins,
        };
        Ok((chunks, stats))
    }

    pub(super) fn len(&self) -> u32 {
        // `new` has checked the number.
        self.first_tokens.len() as u32
    }

    /// The numbers of labels of all chunks.
    pub(super) fn lengths(&self) -> impl Iterator<Item = u32> + '_ {
        let ends = self.begins[1..].iter().copied().chain([self.len()]);
        let ranges = self.begins.iter().zip(ends).enumerate();
        ranges.flat_map(|(index, (begin, end))| {
            let length = self.longest - index as u32;
            (*begin..end).map(move |_| length)
        })
    }

    /// The first token of chunk `index`, which must be below their number.
    pub(super) fn first_token(&self, index: u32) -> u64 {
        self.first_tokens[index as usize]
    }

    /// Chunk `index`, which must be below their number.
    pub(super) fn get(&self, index: u32) -> Chunk {
        let longer = self.begins.partition_point(|begin| *begin <= index) - 1;
        Chunk {
            first_token: self.first_token(index),
            num_labels: self.longest - longer as u32,
        }
    }
}

/// The error of documents that have other lengths when they are read again.
fn changed(dataset: &TokenDataset) -> DataError {
    let why = format!(
        "the documents of {} changed while they were read; start again when they are written",
        dataset.name()
    );
    DataError::OrderSize { why }
}

impl PackingStats {
    /// Counts a document.
    fn count(&mut self, document: &Range<u64>) {
        let num_tokens = document.end - document.start;
        if num_tokens < 2 {
            self.num_dropped += 1;
            return;
        }
        self.num_documents += 1;
        self.num_labels += num_tokens - 1;
        self.num_cut += u64::from(num_tokens - 1 > self.seq_len);
        // The label after the token at position `p` is in the sample `p / seq_len` of the joined
        // documents.
        let sample_of = |position: u64| position / self.seq_len;
        let is_cut = sample_of(document.start) != sample_of(document.end - 2);
        self.num_cut_by_concatenation += u64::from(is_cut);
    }
}

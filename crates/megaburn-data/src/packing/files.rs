//! The bins of a data set in files, which are built once per host.

use std::ops::Range;
use std::path::Path;

use serde_json::json;

use super::{
    chunks::Chunk,
    pack::{BinSize, Packing},
    stats::PackingStats,
};
use crate::{
    dataset::TokenDataset,
    error::DataError,
    index_cache::{IndexEvent, IndexFiles, NpyFile, NpyShape, NpyType, NpyWriter},
    indexed::IndexedDataset,
    part::hex,
};

/// Changes when other bins are made of the same documents.
pub(super) const VERSION: u32 = 1;
/// Number of statistics.
const NUM_STATS: usize = 7;

/// Bins on disk, which are read on demand.
#[derive(Debug)]
pub(super) struct PackedFiles {
    /// The number of chunks before each bin, and of all.
    bins: NpyFile,
    /// The first token of each chunk.
    first_tokens: NpyFile,
    /// The number of labels of each chunk.
    lengths: NpyFile,
    size: BinSize,
    num_tokens: u64,
    stats: PackingStats,
}

impl PackedFiles {
    /// Opens the bins of a data set whose tokens are `tokens` of `set`. If they are not in the
    /// folder, they are built.
    ///
    /// # Errors
    /// The documents cannot be packed, or files cannot be read or written.
    pub(super) fn open(
        folder: &Path,
        dataset: &TokenDataset,
        (set, tokens): (&IndexedDataset, &Range<u64>),
        size: BinSize,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<Self, DataError> {
        // The bins depend on the lengths of the documents and not on their tokens.
        let description = json!({
            "class": "PackedSampler",
            "version": VERSION,
            "index_xxh3": hex(set.index_hash()?),
            "tokens": [tokens.start, tokens.end],
            "seq_len": size.seq_len,
            "multiple": size.multiple,
        });
        let shape = |of, rows| NpyShape {
            of,
            rows,
            row_len: 1,
        };
        let arrays = [
            ("bin_index", shape(NpyType::I64, None)),
            ("first_token_index", shape(NpyType::I64, None)),
            ("num_labels_index", shape(NpyType::U32, None)),
            ("statistics", shape(NpyType::I64, Some(NUM_STATS as u64))),
        ];
        let packing = IndexEvent::Packing {
            name: dataset.name().into(),
        };
        let files = IndexFiles::new(folder, &description, arrays);
        let [bins, first_tokens, lengths, stats] =
            files.open_or_build(report, packing, |out| write(dataset, size, out))?;
        let numbers = stats.numbers(0, NUM_STATS)?;
        let stats = PackingStats::from_numbers(&numbers)
            .ok_or_else(|| stats.damaged(format!("the numbers {numbers:?} cannot be")))?;
        let files = Self {
            bins,
            first_tokens,
            lengths,
            size,
            num_tokens: dataset.num_tokens(),
            stats,
        };
        files.check()?;
        Ok(files)
    }

    /// Compares the sizes of the files.
    fn check(&self) -> Result<(), DataError> {
        let num_samples = self.stats.num_samples;
        if num_samples == 0 || self.bins.rows().checked_sub(1) != Some(num_samples) {
            let why = format!("it does not have the {num_samples} bins of the statistics");
            return Err(self.bins.damaged(why));
        }
        let num_chunks = self.bins.numbers(num_samples, 1)?[0];
        for file in [&self.first_tokens, &self.lengths] {
            if i64::try_from(file.rows()) != Ok(num_chunks) {
                let why = format!("it does not have the {num_chunks} chunks of the bins");
                return Err(file.damaged(why));
            }
        }
        Ok(())
    }

    pub(super) fn stats(&self) -> &PackingStats {
        &self.stats
    }

    /// The chunks of bin `index`, which must be below their number.
    ///
    /// # Errors
    /// The files cannot be read, or are damaged.
    pub(super) fn bin(&self, index: u64) -> Result<Vec<Chunk>, DataError> {
        let chunks = self.bins.numbers(index, 2)?;
        let (begin, end) = (chunks[0], chunks[1]);
        // Each chunk takes some room.
        let most = i64::from(self.size.capacity());
        if begin < 0 || end <= begin || end - begin > most {
            let why = format!("bin {index} has the chunks {begin} to {end}");
            return Err(self.bins.damaged(why));
        }
        let (begin, count) = (begin as u64, (end - begin) as usize);
        let first_tokens = self.first_tokens.numbers(begin, count)?;
        let lengths = self.lengths.numbers(begin, count)?;
        let mut room = self.size.capacity();
        let both = first_tokens.into_iter().zip(lengths);
        let chunks = both.map(|(first_token, length)| {
            let chunk = self.chunk(first_token, length)?;
            let size = self.size.size_of(chunk.num_labels);
            room = room.checked_sub(size).ok_or_else(|| {
                let why = format!("the chunks of bin {index} do not fit into it");
                self.lengths.damaged(why)
            })?;
            Ok(chunk)
        });
        chunks.collect()
    }

    /// The chunk that the files describe.
    fn chunk(&self, first_token: i64, length: i64) -> Result<Chunk, DataError> {
        let inside = 1..=i64::from(self.size.seq_len);
        if !inside.contains(&length) {
            let why = format!("a chunk has {length} labels");
            return Err(self.lengths.damaged(why));
        }
        let first = u64::try_from(first_token).ok();
        let first = first.filter(|first| {
            let end = first.checked_add(length as u64);
            end.is_some_and(|last| last < self.num_tokens)
        });
        let first_token = first.ok_or_else(|| {
            let why = format!(
                "a chunk begins at token {first_token} of {}",
                self.num_tokens
            );
            self.first_tokens.damaged(why)
        })?;
        Ok(Chunk {
            first_token,
            num_labels: length as u32,
        })
    }
}

/// Packs a data set and writes its bins.
fn write(dataset: &TokenDataset, size: BinSize, out: &mut [NpyWriter; 4]) -> Result<(), DataError> {
    let [bins, first_tokens, lengths, statistics] = out;
    let packing = Packing::new(dataset, size)?;
    let mut num_chunks = 0;
    bins.push(0)?;
    for bin in 0..packing.stats().num_samples as usize {
        for chunk in packing.bin(bin) {
            first_tokens.push(chunk.first_token as i64)?;
            lengths.push(chunk.num_labels.into())?;
            num_chunks += 1;
        }
        bins.push(num_chunks)?;
    }
    let mut numbers = packing.stats().numbers().into_iter();
    numbers.try_for_each(|number| statistics.push(number as i64))
}

impl PackingStats {
    fn numbers(&self) -> [u64; NUM_STATS] {
        [
            self.seq_len,
            self.num_samples,
            self.num_documents,
            self.num_dropped,
            self.num_labels,
            self.num_cut,
            self.num_cut_by_concatenation,
        ]
    }

    fn from_numbers(numbers: &[i64]) -> Option<Self> {
        let numbers: Vec<u64> = numbers
            .iter()
            .filter_map(|number| u64::try_from(*number).ok())
            .collect();
        let numbers: [u64; NUM_STATS] = numbers.try_into().ok()?;
        let [
            seq_len,
            num_samples,
            num_documents,
            num_dropped,
            num_labels,
            num_cut,
            num_cut_by_concatenation,
        ] = numbers;
        Some(Self {
            seq_len,
            num_samples,
            num_documents,
            num_dropped,
            num_labels,
            num_cut,
            num_cut_by_concatenation,
        })
    }
}

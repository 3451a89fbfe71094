//! The bins of a data set in memory.

use super::{
    best_fit::Bins,
    chunks::{Chunk, SortedChunks},
    stats::PackingStats,
};
use crate::{dataset::TokenDataset, error::DataError};

/// The size of bins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BinSize {
    /// Number of positions, a multiple of `multiple`.
    pub(super) seq_len: u32,
    /// The positions of a chunk are padded to a multiple of this number.
    pub(super) multiple: u32,
}

impl BinSize {
    /// The most chunks of a bin.
    pub(super) fn capacity(self) -> u32 {
        self.seq_len / self.multiple
    }

    /// How many multiples of positions a chunk takes.
    pub(super) fn size_of(self, num_labels: u32) -> u32 {
        num_labels.div_ceil(self.multiple)
    }
}

/// The bins of a data set. The bins are in the order of the first tokens of their longest chunks,
/// so that bins with short and with long documents are mixed as the documents are.
#[derive(Debug)]
pub(super) struct Packing {
    chunks: SortedChunks,
    bins: Bins,
    stats: PackingStats,
}

impl Packing {
    /// Packs all documents. Memory is 12 bytes for each chunk and 12 for each bin, and up to 24 for
    /// each bin while they are packed.
    ///
    /// # Errors
    /// No document has two tokens; [`SortedChunks::new`] fails.
    pub(super) fn new(dataset: &TokenDataset, size: BinSize) -> Result<Self, DataError> {
        let (chunks, mut stats) = SortedChunks::new(dataset, size.seq_len)?;
        if stats.num_documents == 0 {
            return Err(DataError::NothingToPack {
                name: dataset.name().into(),
                num_documents: stats.num_dropped,
            });
        }
        let sizes = chunks.lengths().map(|length| size.size_of(length));
        let mut bins = Bins::best_fit(sizes, chunks.len(), size.capacity())?;
        bins.sort_by_first(|chunk| chunks.first_token(chunk));
        stats.num_samples = bins.len() as u64;
        Ok(Self {
            chunks,
            bins,
            stats,
        })
    }

    pub(super) fn stats(&self) -> &PackingStats {
        &self.stats
    }

    /// The chunks of bin `index`, which must be below their number.
    pub(super) fn bin(&self, index: usize) -> impl Iterator<Item = Chunk> + '_ {
        self.bins.get(index).map(|chunk| self.chunks.get(chunk))
    }
}

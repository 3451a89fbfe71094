//! What the trainer reads: samples by index.

use std::fmt::Debug;
use std::ops::Range;

use crate::error::DataError;

/// Samples that are read by index. All ranks of a run read the same ones.
pub trait Samples: Debug + Send + Sync {
    /// Number of samples before the order repeats or ends.
    fn num_samples(&self) -> u64;

    /// A hash of what decides the order besides the data, the sequence length and the seed, such as
    /// the length of the run.
    fn order_hash(&self) -> u64 {
        0
    }

    /// The `seq_len + 1` tokens of sample `index`: the first `seq_len` are the inputs, the last
    /// `seq_len` the targets.
    ///
    /// # Errors
    /// The files cannot be read, or hold tokens outside the vocabulary.
    fn tokens(&self, index: u64) -> Result<Vec<u32>, DataError>;

    /// The tokens of the samples `indices`. [`GlobalBatch`](crate::GlobalBatch) gives the indices
    /// of a rank.
    ///
    /// # Errors
    /// As [`Self::tokens`].
    fn batch(&self, indices: Range<u64>) -> Result<Vec<Vec<u32>>, DataError> {
        indices.map(|index| self.tokens(index)).collect()
    }
}

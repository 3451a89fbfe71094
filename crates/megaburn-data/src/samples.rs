//! What the trainer reads: samples by index.

use std::fmt::Debug;
use std::ops::Range;

use crate::error::DataError;

/// What a model reads as one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Consecutive tokens of a data set, usually `seq_len + 1`: all but the last are inputs, all but
    /// the first are labels. Shorter ones are padded.
    Tokens(Vec<u32>),
    /// Documents, or parts of them, that do not attend to each other. Each has one token more than
    /// inputs.
    Documents(Vec<Vec<u32>>),
}

impl Sample {
    /// The tokens, of one document after the other.
    pub fn into_tokens(self) -> Vec<u32> {
        match self {
            Self::Tokens(tokens) => tokens,
            Self::Documents(documents) => documents.concat(),
        }
    }
}

/// Samples that are read by index. All ranks of a run read the same ones.
pub trait Samples: Debug + Send + Sync {
    /// Number of samples before the order repeats or ends.
    fn num_samples(&self) -> u64;

    /// A hash of what decides the order in addition to the data, the sequence length and the seed,
    /// such as the length of the run.
    fn order_hash(&self) -> u64 {
        0
    }

    /// Sample `index`.
    ///
    /// # Errors
    /// The files cannot be read, or hold tokens outside the vocabulary.
    fn sample(&self, index: u64) -> Result<Sample, DataError>;

    /// The tokens of sample `index`, without the ends of documents that [`Self::sample`] may know.
    ///
    /// # Errors
    /// As [`Self::sample`].
    fn tokens(&self, index: u64) -> Result<Vec<u32>, DataError> {
        Ok(self.sample(index)?.into_tokens())
    }

    /// The samples `indices`. [`GlobalBatch`](crate::GlobalBatch) gives the indices of a rank.
    ///
    /// # Errors
    /// As [`Self::sample`].
    fn batch(&self, indices: Range<u64>) -> Result<Vec<Sample>, DataError> {
        indices.map(|index| self.sample(index)).collect()
    }
}

//! What the trainer reads: samples by index.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::{
    error::DataError,
    megatron::{BertSample, T5Sample},
};

/// What a model reads as one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Consecutive tokens of a data set, usually `seq_len + 1`: all but the last are inputs, all but
    /// the first are labels. Shorter ones are padded.
    Tokens(Vec<u32>),
    /// Documents, or parts of them, that do not attend to each other. Each has one token more than
    /// inputs.
    Documents(Vec<Vec<u32>>),
    /// Masked sentences with their labels, for an encoder.
    Bert(Box<BertSample>),
    /// Sentences with sentinels in place of masked spans, for an encoder, and the spans, for a decoder.
    T5(Box<T5Sample>),
}

impl Sample {
    /// The tokens, of one document after the other.
    pub fn into_tokens(self) -> Vec<u32> {
        match self {
            Self::Tokens(tokens) => tokens,
            Self::Documents(documents) => documents.concat(),
            Self::Bert(sample) => sample.text,
            Self::T5(sample) => [sample.text_enc, sample.text_dec].concat(),
        }
    }
}

impl From<BertSample> for Sample {
    fn from(sample: BertSample) -> Self {
        Self::Bert(Box::new(sample))
    }
}

impl From<T5Sample> for Sample {
    fn from(sample: T5Sample) -> Self {
        Self::T5(Box::new(sample))
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

impl<S: Samples + ?Sized> Samples for Arc<S> {
    fn num_samples(&self) -> u64 {
        (**self).num_samples()
    }

    fn order_hash(&self) -> u64 {
        (**self).order_hash()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        (**self).sample(index)
    }

    fn tokens(&self, index: u64) -> Result<Vec<u32>, DataError> {
        (**self).tokens(index)
    }

    fn batch(&self, indices: Range<u64>) -> Result<Vec<Sample>, DataError> {
        (**self).batch(indices)
    }
}

/// The [`order_hash`](Samples::order_hash) of samples from several sources; 0 if theirs are.
pub(crate) fn order_hash_of<S: Samples>(sources: &[S]) -> u64 {
    let hashes: Vec<u64> = sources.iter().map(Samples::order_hash).collect();
    if hashes.iter().all(|hash| *hash == 0) {
        return 0;
    }
    let bytes: Vec<u8> = hashes.into_iter().flat_map(u64::to_le_bytes).collect();
    xxh3_64(&bytes)
}

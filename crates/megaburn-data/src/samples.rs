use crate::error::DataError;

/// Samples that are read by index. All ranks of a run read the same ones.
pub trait Samples: std::fmt::Debug + Send + Sync {
    /// Number of samples before the order repeats or ends.
    fn num_samples(&self) -> u64;
    /// The `seq_len + 1` tokens of sample `index`: the first `seq_len` are the inputs, the last `seq_len` the targets.
    /// # Errors
    /// The files cannot be read, or hold tokens outside the vocabulary.
    fn tokens(&self, index: u64) -> Result<Vec<u32>, DataError>;
}

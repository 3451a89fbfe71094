use std::ops::Range;
use std::sync::Arc;

use crate::{
    error::DataError,
    indexed::{DocumentSplit, IndexedDataset},
};

/// Sequences of an indexed data set, of which samples are made. Megatron-LM's `GPTDataset` calls
/// them documents, and mostly each document is one sequence.
#[derive(Clone, Debug)]
pub struct SequenceRange {
    dataset: Arc<IndexedDataset>,
    sequences: Range<u64>,
}

impl SequenceRange {
    /// All sequences of a data set.
    pub fn all(dataset: Arc<IndexedDataset>) -> Self {
        let sequences = 0..dataset.num_sequences();
        Self { dataset, sequences }
    }

    /// Divides a data set by weights into training, validation and test, as Megatron-LM's `--split`
    /// does. Weights that are not given are 0.
    ///
    /// # Errors
    /// As [`DocumentSplit::new`]: the weights are no weights, or a part whose weight is positive
    /// would have no sequences.
    pub fn split(dataset: &Arc<IndexedDataset>, weights: &[f64]) -> Result<[Self; 3], DataError> {
        let num_sequences = dataset.num_sequences();
        let parts = DocumentSplit::new(weights, num_sequences);
        let parts = parts.map_err(|error| match error {
            DataError::EmptyPart { name, .. } => DataError::EmptyPart {
                name,
                why: format!(
                    "none of the {num_sequences} sequences of `{}`",
                    dataset.prefix().display()
                ),
            },
            error => error,
        })?;
        let part = |sequences: &Range<u64>| Self {
            dataset: dataset.clone(),
            sequences: sequences.clone(),
        };
        Ok(parts.documents().each_ref().map(part))
    }

    /// The data set.
    pub fn dataset(&self) -> &Arc<IndexedDataset> {
        &self.dataset
    }

    /// The numbers of the sequences.
    pub fn sequences(&self) -> &Range<u64> {
        &self.sequences
    }

    /// The positions of the tokens among those of all sequences.
    ///
    /// # Errors
    /// The index cannot be read, or is damaged.
    pub fn tokens(&self) -> Result<Range<u64>, DataError> {
        let size = self.dataset.token_type().size();
        let begin = self.dataset.bytes_before(self.sequences.start)? / size;
        let end = self.dataset.bytes_before(self.sequences.end)? / size;
        Ok(begin..end.max(begin))
    }

    /// Number of tokens, from the positions of the first and the last sequence.
    pub(super) fn num_tokens(&self) -> Result<u64, DataError> {
        let Range { start, end } = self.tokens()?;
        Ok(end - start)
    }

    /// What messages call it.
    pub(super) fn name(&self) -> String {
        let prefix = self.dataset.prefix().display();
        if self.sequences == (0..self.dataset.num_sequences()) {
            return prefix.to_string();
        }
        format!("sequences {:?} of {prefix}", self.sequences)
    }
}

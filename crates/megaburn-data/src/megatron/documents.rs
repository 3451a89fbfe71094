use std::ops::Range;
use std::sync::Arc;

use crate::{
    error::DataError,
    indexed::{DocumentSplit, IndexedDataset},
};

/// Documents of an indexed data set, of whose sentences masked samples are made. Each sequence of a
/// document is a sentence, as `megaburn data preprocess --split-sentences` writes them.
#[derive(Clone, Debug)]
pub struct DocumentRange {
    dataset: Arc<IndexedDataset>,
    documents: Range<u64>,
}

impl DocumentRange {
    /// All documents of a data set.
    pub fn all(dataset: Arc<IndexedDataset>) -> Self {
        let documents = 0..dataset.num_documents();
        Self { dataset, documents }
    }

    /// Divides a data set by weights into training, validation and test, as Megatron-LM's `--split`
    /// does for masked data sets. Weights that are not given are 0.
    ///
    /// # Errors
    /// As [`DocumentSplit::new`]: the weights are no weights, or a part whose weight is positive
    /// would have no documents.
    pub fn split(dataset: &Arc<IndexedDataset>, weights: &[f64]) -> Result<[Self; 3], DataError> {
        let num_documents = dataset.num_documents();
        let parts = DocumentSplit::new(weights, num_documents);
        let parts = parts.map_err(|error| match error {
            DataError::EmptyPart { name, .. } => DataError::EmptyPart {
                name,
                why: format!(
                    "none of the {num_documents} documents of `{}`",
                    dataset.prefix().display()
                ),
            },
            error => error,
        })?;
        let part = |documents: &Range<u64>| Self {
            dataset: dataset.clone(),
            documents: documents.clone(),
        };
        Ok(parts.documents().each_ref().map(part))
    }

    /// The data set.
    pub fn dataset(&self) -> &Arc<IndexedDataset> {
        &self.dataset
    }

    /// The numbers of the documents.
    pub fn documents(&self) -> &Range<u64> {
        &self.documents
    }

    /// The numbers of their sentences.
    ///
    /// # Errors
    /// The index cannot be read, or is damaged.
    pub(super) fn sentences(&self) -> Result<Range<u64>, DataError> {
        let begin = self.dataset.sequences_before(self.documents.start)?;
        let end = self.dataset.sequences_before(self.documents.end)?;
        Ok(begin..end.max(begin))
    }

    /// What messages call it.
    pub(super) fn name(&self) -> String {
        let prefix = self.dataset.prefix().display();
        if self.documents == (0..self.dataset.num_documents()) {
            return prefix.to_string();
        }
        format!("documents {:?} of {prefix}", self.documents)
    }
}

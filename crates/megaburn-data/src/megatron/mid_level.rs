//! What a blend asks of the data sets that it mixes. Megatron-LM calls them mid-level data sets.

use std::fmt::Debug;
use std::path::Path;

use crate::{error::DataError, index_cache::IndexEvent};

/// Builds a data set of one source, for a [`BlendedDataset`](crate::BlendedDataset).
pub trait MidLevelConfig: Clone + Debug {
    /// A data set on disk, or a part of it.
    type Source;
    /// The samples of a source.
    type Dataset: MidLevelDataset;

    /// Sets the number of samples; `None` for those of one epoch.
    fn with_samples_of(self, num_samples: Option<u64>) -> Self;

    /// The number of samples that is asked for.
    fn num_samples(&self) -> Option<u64>;

    /// The folder of the index files.
    fn cache(&self) -> &Path;

    /// What messages call a source.
    fn name_of(source: &Self::Source) -> String;

    /// Opens or builds the index of the samples.
    ///
    /// # Errors
    /// A setting is out of its range, the source gives no samples, or files cannot be read or
    /// written.
    fn build_for_blend(
        &self,
        source: &Self::Source,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<Self::Dataset, DataError>;
}

/// A data set of which a blend reads samples.
pub trait MidLevelDataset: Debug {
    /// What a model reads at a time.
    type Sample;

    /// Number of samples.
    fn size(&self) -> u64;

    /// A hash of what decides the order in addition to the data and the settings.
    fn hash_of_order(&self) -> u64;

    /// Sample `index`.
    ///
    /// # Errors
    /// There is no such sample, or files cannot be read.
    fn read(&self, index: u64) -> Result<Self::Sample, DataError>;
}

//! Burn's datasets in the order of a run, and samples as a dataset of Burn's.

use std::error::Error;
use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::ops::Range;

use burn_dataset::{Dataset, DatasetError};

use crate::{
    epoch_order::EpochOrder,
    error::DataError,
    samples::{Sample, Samples},
};

/// The items of one of Burn's datasets in an order that is a pure function
/// `(seed, index) -> item`, without end: each epoch has every item once, in an order of its own. It
/// does not depend on the number of ranks, batch sizes, or the step at which a run was resumed.
///
/// [`GlobalBatch`](crate::GlobalBatch) gives the indices that each data-parallel rank reads. A
/// dataset whose items are [`Sample`]s, such as the result of Burn's `MapperDataset`, is read by all
/// that reads [`Samples`].
///
/// ```
/// use burn_dataset::{Dataset, InMemDataset};
/// use megaburn_data::{DatasetSampler, GlobalBatch, Sample, Samples};
///
/// let items = InMemDataset::new(vec!["a", "b", "c", "d", "e"]);
/// let sampler = DatasetSampler::shuffled(items, 42)?;
/// let batch = GlobalBatch::new(4, 2, 2)?; // 4 items a step, 2 a micro-batch, 2 ranks
/// let mine = sampler.batch(batch.micro_batch(0, 1, 0)).unwrap();
/// assert_eq!(mine, [sampler.item(2).unwrap(), sampler.item(3).unwrap()]);
///
/// let samples = InMemDataset::new(vec![Sample::Tokens(vec![1, 2, 3])]);
/// let samples = DatasetSampler::sequential(samples)?;
/// assert_eq!(samples.tokens(7)?, [1, 2, 3]);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
pub struct DatasetSampler<D, I, E = DatasetError> {
    dataset: D,
    order: EpochOrder,
    item: PhantomData<fn() -> Result<I, E>>,
}

impl<D, I, E> DatasetSampler<D, I, E>
where
    D: Dataset<I, E>,
    E: Error + Send + Sync + 'static,
{
    /// Items that are reshuffled in each epoch, for training.
    ///
    /// # Errors
    /// The dataset is empty.
    pub fn shuffled(dataset: D, seed: u64) -> Result<Self, DataError> {
        Self::new(dataset, |len| EpochOrder::shuffled(len, seed, 0))
    }

    /// Items in the order of the dataset, which restarts after the last one; for validation.
    ///
    /// # Errors
    /// The dataset is empty.
    pub fn sequential(dataset: D) -> Result<Self, DataError> {
        Self::new(dataset, EpochOrder::sequential)
    }

    fn new(dataset: D, order: impl FnOnce(u64) -> EpochOrder) -> Result<Self, DataError> {
        if dataset.is_empty() {
            let what = "the number of items of the dataset";
            return Err(DataError::Zero { what });
        }
        Ok(Self {
            order: order(dataset.len() as u64),
            dataset,
            item: PhantomData,
        })
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Number of items of the dataset. An epoch reads each once.
    pub fn num_items(&self) -> u64 {
        self.order.num_samples()
    }

    /// The epoch of index `index`, and the index of its item in the dataset.
    pub fn position(&self, index: u64) -> (u64, u64) {
        self.order.position(index)
    }

    /// The item at `index` of the order.
    ///
    /// # Errors
    /// The dataset cannot read the item.
    pub fn item(&self, index: u64) -> Result<I, E> {
        self.dataset.get(self.position(index).1 as usize)
    }

    /// The items at `indices` of the order.
    ///
    /// # Errors
    /// The dataset cannot read the item.
    pub fn batch(&self, indices: Range<u64>) -> Result<Vec<I>, E> {
        let items = indices.map(|index| self.position(index).1 as usize);
        self.dataset.get_many(items.collect())
    }
}

impl<D, I, E> Debug for DatasetSampler<D, I, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatasetSampler")
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}

impl<D, E> Samples for DatasetSampler<D, Sample, E>
where
    D: Dataset<Sample, E>,
    E: Error + Send + Sync + 'static,
{
    fn num_samples(&self) -> u64 {
        self.num_items()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        self.item(index).map_err(|error| DataError::BurnDataset {
            item: self.position(index).1,
            why: error.to_string(),
        })
    }
}

/// Samples as a dataset of Burn's, for its data loaders. Item `i` is sample `i`.
///
/// ```
/// use burn_dataset::Dataset;
/// use megaburn_data::{Sampler, SamplesDataset, TokenDataset};
///
/// let set = TokenDataset::from_tokens("count", &[0, 1, 2, 3, 4, 5, 6], 7)?;
/// let dataset = SamplesDataset::new(Sampler::sequential(set, 2)?);
/// let items: Result<Vec<_>, _> = dataset.iter().collect();
/// let tokens: Vec<_> = items?.into_iter().map(|sample| sample.into_tokens()).collect();
/// assert_eq!(tokens, [[0, 1, 2], [2, 3, 4], [4, 5, 6]]);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SamplesDataset<S> {
    samples: S,
    items: Range<u64>,
}

impl<S: Samples> SamplesDataset<S> {
    /// The first [`num_samples`](Samples::num_samples) samples. For most orders they are one epoch.
    pub fn new(samples: S) -> Self {
        let items = 0..samples.num_samples();
        Self { samples, items }
    }

    /// The samples `items`, such as those after a restart, or of several epochs.
    pub fn with_range(self, items: Range<u64>) -> Self {
        Self { items, ..self }
    }
}

impl<S: Samples> Dataset<Sample, DataError> for SamplesDataset<S> {
    fn get(&self, index: usize) -> Result<Sample, DataError> {
        assert!(
            index < self.len(),
            "item {index} must be less than {}",
            self.len()
        );
        self.samples.sample(self.items.start + index as u64)
    }

    fn len(&self) -> usize {
        self.items.end.saturating_sub(self.items.start) as usize
    }
}

#[cfg(test)]
mod tests {
    use burn_dataset::{
        InMemDataset,
        transform::{Mapper, MapperDataset},
    };
    use rstest::rstest;

    use super::*;
    use crate::{batch::GlobalBatch, dataset::TokenDataset, sample_log, sampler::Sampler};

    #[rstest]
    fn every_epoch_has_every_item_once(#[values(1, 2, 37, 64)] len: u64) {
        let seed = fastrand::u64(..);
        let items = InMemDataset::new((0..len).collect());
        let sampler = DatasetSampler::shuffled(items, seed).unwrap();
        assert_eq!(sampler.num_items(), len);
        for epoch in 0..3 {
            let indices = epoch * len..(epoch + 1) * len;
            let read: Vec<u64> = sampler.batch(indices.clone()).unwrap();
            let one_by_one = indices.map(|index| sampler.item(index).unwrap());
            assert_eq!(read, one_by_one.collect::<Vec<_>>());
            let mut sorted = read;
            sorted.sort_unstable();
            assert_eq!(sorted, (0..len).collect::<Vec<_>>());
        }
    }

    struct Count;

    impl Mapper<u32, Sample> for Count {
        fn map(&self, first: &u32) -> Sample {
            Sample::Tokens((*first..*first + 4).collect())
        }
    }

    #[test]
    fn mapped_items_are_samples_for_every_layout() {
        let mapped = || MapperDataset::new(InMemDataset::new((0..100u32).collect()), Count);
        let sampler = DatasetSampler::shuffled(mapped(), 5).unwrap();
        let hash = |global, micro, dp| {
            let batch = GlobalBatch::new(global, micro, dp).unwrap();
            sample_log::order_hash(&sampler, &batch, 240).unwrap()
        };
        assert_eq!(hash(8, 1, 4), hash(24, 3, 2));
        let sequential = DatasetSampler::sequential(mapped()).unwrap();
        assert_eq!(sequential.tokens(103).unwrap(), [3, 4, 5, 6]);
    }

    #[test]
    fn an_empty_dataset_and_an_item_that_fails_are_named() {
        let empty = InMemDataset::<u32>::new(Vec::new());
        let error = DatasetSampler::shuffled(empty, 1).unwrap_err().to_string();
        assert!(
            error.starts_with("the number of items of the dataset is 0"),
            "{error}"
        );

        struct Failing;
        impl Dataset<Sample> for Failing {
            fn get(&self, index: usize) -> Result<Sample, DatasetError> {
                Err(DatasetError::new(std::io::Error::other(format!(
                    "no item {index}"
                ))))
            }
            fn len(&self) -> usize {
                9
            }
        }
        let sampler = DatasetSampler::sequential(Failing).unwrap();
        let error = sampler.sample(12).unwrap_err().to_string();
        assert!(
            error.contains("item 3 ") && error.contains("no item 3"),
            "{error}"
        );
    }

    #[test]
    fn samples_are_a_dataset_from_any_of_them_on() {
        let tokens: Vec<u32> = (0..50).collect();
        let set = TokenDataset::from_tokens("count", &tokens, 50).unwrap();
        let sampler = Sampler::shuffled(set, 7, 3).unwrap();
        let dataset = SamplesDataset::new(sampler.clone());
        assert_eq!(dataset.len(), 7);
        let later = dataset.with_range(4..20);
        let items: Result<Vec<Sample>, _> = later.iter().collect();
        assert_eq!(items.unwrap(), sampler.batch(4..20).unwrap());
    }
}

//! All samples of several data sets.

use megaburn_mesh::{PositionRng, Purpose};

use crate::{
    error::DataError,
    permutation::Permutation,
    samples::{Sample, Samples, order_hash_of},
};

/// All samples of several data sets, each once, in a random order: for an evaluation.
/// Sources of different types are joined as `Arc<dyn Samples>`.
#[derive(Clone, Debug)]
pub struct UnionSampler<S> {
    sources: Vec<S>,
    order: Permutation,
}

impl<S: Samples> UnionSampler<S> {
    /// All samples of `sources`, in an order that depends on `seed`.
    ///
    /// # Errors
    /// There is no source.
    pub fn new(sources: Vec<S>, seed: u64) -> Result<Self, DataError> {
        let num_samples: u64 = sources.iter().map(Samples::num_samples).sum();
        if num_samples == 0 {
            let what = "the number of data sets";
            return Err(DataError::Zero { what });
        }
        let rng = PositionRng::new(seed, Purpose::DataOrder, "union");
        let order = Permutation::new(num_samples, rng);
        Ok(Self { sources, order })
    }
}

impl<S: Samples> Samples for UnionSampler<S> {
    fn num_samples(&self) -> u64 {
        self.sources.iter().map(Samples::num_samples).sum()
    }

    fn order_hash(&self) -> u64 {
        order_hash_of(&self.sources)
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let mut left = self.order.at(index % self.num_samples());
        for source in &self.sources {
            if left < source.num_samples() {
                return source.sample(left);
            }
            left -= source.num_samples();
        }
        unreachable!("the permutation is of all samples")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dataset::TokenDataset, sampler::Sampler};

    #[test]
    fn every_sample_of_every_source_is_read_once() {
        let sampler = |first: u32, len: u32| {
            let tokens: Vec<u32> = (first..first + len).collect();
            let set = TokenDataset::from_tokens("count", &tokens, 1000).unwrap();
            Sampler::sequential(set, 3).unwrap()
        };
        let union = UnionSampler::new(vec![sampler(0, 31), sampler(500, 100)], 5).unwrap();
        let read = (0..union.num_samples()).map(|index| union.tokens(index).unwrap()[0]);
        let read: Vec<u32> = read.collect();
        let mut sorted = read.clone();
        sorted.sort_unstable();
        let expected = (0..10).map(|n| 3 * n).chain((0..33).map(|n| 500 + 3 * n));
        assert_eq!(sorted, expected.collect::<Vec<_>>());
        assert_ne!(read, sorted);
        assert!(UnionSampler::<Sampler>::new(Vec::new(), 5).is_err());
    }
}

//! The order in which samples are read.

use crate::{
    dataset::TokenDataset,
    epoch_order::EpochOrder,
    error::DataError,
    samples::{Sample, Samples},
};

/// An unlimited sequence of samples of a data set: a pure function
/// `(seed, sample index) -> tokens`, computed on demand.
///
/// Sample index `i` belongs to epoch `i / num_samples`. Each epoch reads every sample once, in the
/// order of its own [`Permutation`](crate::Permutation). The order does not depend on the
/// data-parallel degree, the batch sizes, the length of the run, or the step at which it was
/// resumed. (It does depend on the sequence length and the text, which define the samples.)
#[derive(Clone, Debug)]
pub struct Sampler {
    dataset: TokenDataset,
    seq_len: usize,
    order: EpochOrder,
}

impl Sampler {
    /// Samples of `seq_len + 1` tokens, reshuffled in each epoch; for training.
    ///
    /// # Errors
    /// `seq_len` is 0, or the data set is shorter than one sample.
    pub fn shuffled(dataset: TokenDataset, seq_len: usize, seed: u64) -> Result<Self, DataError> {
        Self::shuffled_source(dataset, seq_len, seed, 0)
    }

    /// As [`Self::shuffled`], for data set `number` of several that are mixed: data sets of the same
    /// size have different orders.
    ///
    /// # Errors
    /// As [`Self::shuffled`].
    pub fn shuffled_source(
        dataset: TokenDataset,
        seq_len: usize,
        seed: u64,
        number: usize,
    ) -> Result<Self, DataError> {
        Self::new(dataset, seq_len, |num_samples| {
            EpochOrder::shuffled(num_samples, seed, number)
        })
    }

    /// Samples of `seq_len + 1` tokens in text order, which restart after the last one; for
    /// validation.
    ///
    /// # Errors
    /// As [`Self::shuffled`].
    pub fn sequential(dataset: TokenDataset, seq_len: usize) -> Result<Self, DataError> {
        Self::new(dataset, seq_len, EpochOrder::sequential)
    }

    fn new(
        dataset: TokenDataset,
        seq_len: usize,
        order: impl FnOnce(u64) -> EpochOrder,
    ) -> Result<Self, DataError> {
        if seq_len == 0 {
            return Err(DataError::Zero {
                what: "the sequence length",
            });
        }
        let num_samples = dataset.num_samples(seq_len);
        if num_samples == 0 {
            return Err(DataError::TooShort {
                name: dataset.name().into(),
                found: dataset.num_tokens(),
                needed: seq_len as u64 + 1,
                seq_len,
            });
        }
        Ok(Self {
            dataset,
            seq_len,
            order: order(num_samples),
        })
    }

    /// Number of targets of a sample.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The data set that is sampled.
    pub fn dataset(&self) -> &TokenDataset {
        &self.dataset
    }

    /// The epoch of sample `index`, and the index of the sample in text order.
    pub fn position(&self, index: u64) -> (u64, u64) {
        self.order.position(index)
    }
}

impl Samples for Sampler {
    /// Number of samples of an epoch.
    fn num_samples(&self) -> u64 {
        self.order.num_samples()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let (_, sample) = self.position(index);
        let tokens = self.dataset.sample(self.seq_len, sample)?;
        Ok(Sample::Tokens(tokens))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn dataset(len: usize) -> TokenDataset {
        let tokens: Vec<u32> = (0..len as u32).collect();
        TokenDataset::from_tokens("count", &tokens, len).unwrap()
    }

    fn epoch(sampler: &Sampler, epoch: u64) -> Vec<u64> {
        let n = sampler.num_samples();
        (epoch * n..(epoch + 1) * n)
            .map(|i| {
                let (e, sample) = sampler.position(i);
                assert_eq!(e, epoch);
                sample
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn an_epoch_reads_every_sample_once(len in 20usize..2000, seq_len in 1usize..19, seed: u64) {
            let sampler = Sampler::shuffled(dataset(len), seq_len, seed).unwrap();
            for e in [0, 1, 1_000_000] {
                let mut order = epoch(&sampler, e);
                order.sort_unstable();
                prop_assert_eq!(order, (0..sampler.num_samples()).collect::<Vec<_>>());
            }
        }

        #[test]
        fn a_sample_is_a_stretch_of_the_text(len in 20usize..2000, seq_len in 1usize..19, i: u64) {
            let sampler = Sampler::shuffled(dataset(len), seq_len, 5).unwrap();
            let start = sampler.position(i).1 as u32 * seq_len as u32;
            let expected: Vec<u32> = (start..=start + seq_len as u32).collect();
            prop_assert_eq!(sampler.tokens(i).unwrap(), expected);
        }
    }

    #[rstest]
    fn epochs_and_seeds_differ(#[values(64, 97)] num_samples: usize) {
        let sampler = |seed| Sampler::shuffled(dataset(num_samples * 3 + 1), 3, seed).unwrap();
        let first = epoch(&sampler(1), 0);
        assert_ne!(
            first,
            (0..num_samples as u64).collect::<Vec<_>>(),
            "not the text's order"
        );
        assert_ne!(first, epoch(&sampler(1), 1));
        assert_ne!(first, epoch(&sampler(2), 0));
        assert_eq!(first, epoch(&sampler(1), 0));
    }

    #[test]
    fn validation_follows_the_text_and_starts_again() {
        let sampler = Sampler::sequential(dataset(11), 3).unwrap();
        assert_eq!(epoch(&sampler, 0), [0, 1, 2]);
        assert_eq!(
            sampler.batch(2..4).unwrap(),
            [vec![6, 7, 8, 9], vec![0, 1, 2, 3]].map(Sample::Tokens)
        );
    }

    #[test]
    fn a_text_shorter_than_a_sample_is_refused_with_both_numbers() {
        let split = dataset(100).split(0.1).unwrap();
        assert!(Sampler::shuffled(split.train.clone(), 89, 1).is_ok());
        let error = Sampler::shuffled(split.train, 90, 1)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "training part of count has 90 tokens, but one sample of sequence length 90 needs 91; give more text, a shorter sequence (data.seq_len) or another part for validation (data.validation_fraction, data.split)"
        );
        let error = Sampler::sequential(split.valid, 16)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("validation part of count has 10 tokens, "),
            "{error}"
        );
        assert!(error.contains(" sequence length 16 needs 17;"), "{error}");
        let error = Sampler::sequential(dataset(9), 0).unwrap_err().to_string();
        assert_eq!(error, "the sequence length is 0 but must be at least 1");
    }
}

//! Records which samples were read: equal hashes mean equal samples in equal order.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::{batch::GlobalBatch, error::DataError, samples::Samples};

/// The samples that were read, as one hash of the tokens per sample. Each rank keeps a log of its
/// own, and the logs are merged; the result does not depend on which rank read which sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampleLog {
    hashes: BTreeMap<u64, u64>,
}

impl SampleLog {
    /// An empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that sample `index` held `tokens`.
    ///
    /// # Errors
    /// The sample was recorded before with other tokens.
    pub fn record(&mut self, index: u64, tokens: &[u32]) -> Result<(), DataError> {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.insert(index, xxh3_64(&bytes))
    }

    /// Adds the samples that another rank read, as returned by its [`Self::entries`].
    ///
    /// # Errors
    /// Both ranks read a sample, with different tokens.
    pub fn merge(
        &mut self,
        entries: impl IntoIterator<Item = (u64, u64)>,
    ) -> Result<(), DataError> {
        entries
            .into_iter()
            .try_for_each(|(index, hash)| self.insert(index, hash))
    }

    /// Pairs of sample index and hash in global order, for sending to another rank.
    pub fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        self.hashes.iter().map(|(&index, &hash)| (index, hash))
    }

    /// The xxh3 hash of the first `n` samples in global order; `None` if one of them is missing.
    pub fn digest(&self, n: u64) -> Option<u64> {
        let mut whole = Xxh3::new();
        for index in 0..n {
            whole.update(&self.hashes.get(&index)?.to_le_bytes());
        }
        Some(whole.digest())
    }

    fn insert(&mut self, index: u64, hash: u64) -> Result<(), DataError> {
        match self.hashes.insert(index, hash) {
            Some(before) if before != hash => Err(DataError::SampleConflict { index }),
            _ => Ok(()),
        }
    }
}

/// The xxh3 hash of the tokens of the first `n` samples in global order, merged from what each
/// data-parallel rank of `batch` reads. It is equal for every data-parallel degree and batch size.
///
/// # Errors
/// Two ranks read a sample with different tokens, or a sample cannot be read.
pub fn order_hash(samples: &dyn Samples, batch: &GlobalBatch, n: u64) -> Result<u64, DataError> {
    let num_steps = n.div_ceil(batch.global_batch_size() as u64);
    let mut whole = SampleLog::new();
    for dp_rank in 0..batch.dp() {
        let mut mine = SampleLog::new();
        for step in 0..num_steps {
            let consumed = step * batch.global_batch_size() as u64;
            for micro_batch in 0..batch.num_micro_batches() {
                let indices = batch.micro_batch(consumed, dp_rank, micro_batch);
                let counted = batch.counted(consumed, dp_rank, micro_batch);
                for index in indices.skip(counted.start).take(counted.len()) {
                    mine.record(index, &samples.tokens(index)?)?;
                }
            }
        }
        whole.merge(mine.entries())?;
    }
    Ok(whole
        .digest(n)
        .expect("the samples of all ranks in complete steps cover the first n samples"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dataset::TokenDataset, sampler::Sampler};

    fn sampler(seed: u64) -> Sampler {
        let tokens: Vec<u32> = (0..5003u32).map(|i| i * i % 251).collect();
        let set = TokenDataset::from_tokens("squares", &tokens, 251).unwrap();
        Sampler::shuffled(set, 16, seed).unwrap()
    }

    #[test]
    fn the_first_thousand_samples_are_the_same_for_every_degree_and_batch() {
        let order = sampler(7);
        assert!(order.num_samples() < 500, "the thousand cross epochs");
        let hash = |global, micro, dp| {
            order_hash(&order, &GlobalBatch::new(global, micro, dp).unwrap(), 1000).unwrap()
        };
        let one = hash(1, 1, 1);
        for dp in [1, 2, 4, 8] {
            for (global, micro) in [(8, 1), (16, 2), (48, 3), (24, 1)] {
                assert_eq!(
                    one,
                    hash(global, micro, dp),
                    "dp {dp} global {global} micro {micro}"
                );
            }
        }
        let batch = GlobalBatch::new(8, 1, 4).unwrap();
        assert_ne!(one, order_hash(&sampler(8), &batch, 1000).unwrap());
        assert_ne!(one, order_hash(&order, &batch, 999).unwrap());
    }

    #[test]
    fn a_resume_under_another_layout_reads_on_where_the_first_run_stopped() {
        let order = sampler(3);
        let mut log = SampleLog::new();
        let mut consumed = 0;
        for (dp, global, num_steps) in [(2, 8, 10), (4, 24, 3), (1, 5, 4), (3, 12, 2)] {
            let batch = GlobalBatch::new(global, 1, dp).unwrap();
            for _ in 0..num_steps {
                for index in (0..dp).rev().flat_map(|r| batch.rank(consumed, r)) {
                    log.record(index, &order.tokens(index).unwrap()).unwrap();
                }
                consumed += global as u64;
            }
        }
        let whole = order_hash(&order, &GlobalBatch::new(1, 1, 1).unwrap(), consumed).unwrap();
        assert_eq!(log.digest(consumed), Some(whole));
        assert_eq!(log.digest(consumed + 1), None);
    }

    #[test]
    fn ranks_that_read_a_sample_differently_are_found_out() {
        let mut a = SampleLog::new();
        let mut b = SampleLog::new();
        a.record(5, &[1, 2]).unwrap();
        b.record(5, &[1, 3]).unwrap();
        a.record(5, &[1, 2]).unwrap();
        let error = a.merge(b.entries()).unwrap_err().to_string();
        assert_eq!(
            error,
            "two ranks read different tokens for sample 5; their seeds, texts or sequence lengths differ: give all hosts the same files and the same [data]"
        );
    }
}

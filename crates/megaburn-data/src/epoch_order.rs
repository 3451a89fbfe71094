//! The order of the samples of a data set in each epoch.

use megaburn_mesh::{PositionRng, Purpose};

use crate::permutation::Permutation;

/// Every sample of a data set once in each epoch.
#[derive(Clone, Copy, Debug)]
pub struct EpochOrder {
    num_samples: u64,
    shuffle: Option<PositionRng>,
}

impl EpochOrder {
    /// Each epoch has an order of its own. Data set `number` of a mixture has another order than
    /// others of its size.
    pub fn shuffled(num_samples: u64, seed: u64, number: usize) -> Self {
        let name = match number {
            0 => "train".into(),
            _ => format!("train {number}"),
        };
        Self {
            num_samples,
            shuffle: Some(PositionRng::new(seed, Purpose::DataOrder, &name)),
        }
    }

    /// All epochs have the order of the data set.
    pub fn sequential(num_samples: u64) -> Self {
        Self {
            num_samples,
            shuffle: None,
        }
    }

    /// Number of samples of an epoch, which is at least 1.
    pub fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// The epoch of sample `index`, and its number in the data set.
    pub fn position(&self, index: u64) -> (u64, u64) {
        let epoch = index / self.num_samples;
        let index = index % self.num_samples;
        let sample = match self.shuffle {
            Some(rng) => Permutation::new(self.num_samples, rng.with_stream(epoch)).at(index),
            None => index,
        };
        (epoch, sample)
    }
}

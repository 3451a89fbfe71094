//! NumPy's legacy generator, `numpy.random.RandomState`, as far as Megatron-LM draws from it.
//!
//! Source: `numpy/random/mtrand.pyx` (`shuffle`, `choice`, `randint`),
//! `numpy/random/src/distributions/distributions.c` (`random_interval`),
//! `numpy/random/src/legacy/legacy-distributions.c` (`legacy_random_geometric`) of NumPy, whose
//! stream of `RandomState` is frozen.

use rand_mt::Mt;

/// A `numpy.random.RandomState` that was seeded with an integer.
#[derive(Debug)]
pub(super) struct RandomState(Mt);

impl RandomState {
    pub(super) fn new(seed: u32) -> Self {
        Self(Mt::new(seed))
    }

    /// A number from 0 to `most`. Numbers are drawn with as many bits as `most` has, until one is
    /// in the range.
    fn interval(&mut self, most: u64) -> u64 {
        let mask = u64::MAX.checked_shr(most.leading_zeros()).unwrap_or(0);
        loop {
            let drawn = match u32::try_from(most) {
                Ok(0) => return 0,
                Ok(_) => u64::from(self.0.next_u32()),
                Err(_) => self.0.next_u64(),
            };
            if drawn & mask <= most {
                return drawn & mask;
            }
        }
    }

    /// A number in `[0, 1)` of 53 bits (`random`).
    pub(super) fn uniform(&mut self) -> f64 {
        let high = f64::from(self.0.next_u32() >> 5);
        let low = f64::from(self.0.next_u32() >> 6);
        (high * 67_108_864.0 + low) / 9_007_199_254_740_992.0
    }

    /// An index below `len`, which is at least 1 (`randint(0, len)`).
    pub(super) fn below(&mut self, len: usize) -> usize {
        // The number is below `len`, which is a `usize`.
        self.interval(len as u64 - 1) as usize
    }

    /// An index of a distribution whose cumulative probabilities are given (`choice`).
    pub(super) fn choice(&mut self, cumulative: &[f64]) -> usize {
        let drawn = self.uniform();
        cumulative.partition_point(|probability| *probability <= drawn)
    }

    /// The number of trials up to the first success, whose probability is below 1/3 (`geometric`).
    pub(super) fn geometric(&mut self, probability: f64) -> u64 {
        ((-self.uniform()).ln_1p() / (1.0 - probability).ln()).ceil() as u64
    }

    /// Puts the elements into a random order (Fisher-Yates, from the last element on).
    pub(super) fn shuffle<T>(&mut self, elements: &mut [T]) {
        for last in (1..elements.len()).rev() {
            // The number is at most `last`, which is a `usize`.
            elements.swap(last, self.interval(last as u64) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn numpy_values() -> Value {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
        let text = std::fs::read_to_string(format!("{folder}/megatron-order/numpy.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn arrays_are_shuffled_as_numpy_does() {
        for case in numpy_values()["shuffles"].as_array().unwrap() {
            let mut state = RandomState::new(case["seed"].as_u64().unwrap() as u32);
            for expected in case["arrays"].as_array().unwrap() {
                let mut found: Vec<usize> = (0..expected.as_array().unwrap().len()).collect();
                state.shuffle(&mut found);
                assert_eq!(serde_json::json!(found), *expected);
            }
        }
    }

    #[test]
    fn numbers_above_32_bits_are_drawn_as_numpy_does() {
        for case in numpy_values()["bounded"].as_array().unwrap() {
            let mut state = RandomState::new(case["seed"].as_u64().unwrap() as u32);
            for expected in case["drawn"].as_array().unwrap() {
                let most = case["most"].as_u64().unwrap();
                assert_eq!(state.interval(most), expected.as_u64().unwrap(), "{most}");
            }
        }
    }

    #[test]
    fn the_least_and_the_greatest_bound_are_drawn() {
        let mut state = RandomState::new(9);
        assert_eq!(state.interval(0), 0);
        assert_eq!(state.0, Mt::new(9), "nothing is drawn for it");
        assert_eq!(state.interval(u64::MAX), Mt::new(9).next_u64());
    }
}

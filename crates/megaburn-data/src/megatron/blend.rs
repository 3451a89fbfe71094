//! The arithmetic of blends.
//!
//! Source: `build_blending_indices` and `build_exhaustive_blending_indices` of `helpers.cpp`,
//! `_get_size_per_split_per_dataset` of `blended_megatron_dataset_builder.py`, `normalize` of
//! `utils.py`.

/// The numbers that NumPy adds up with one accumulator each.
const PAIRWISE_BLOCK: usize = 128;

/// Weights divided by their sum.
pub(super) fn normalize(weights: &[f64]) -> Vec<f64> {
    let sum = pairwise_sum(weights);
    weights.iter().map(|weight| weight / sum).collect()
}

/// The sum of numbers in the order of `numpy.sum`, which decides its last bits.
///
/// Source: `pairwise_sum` of NumPy's `loops_utils.h.src`.
fn pairwise_sum(numbers: &[f64]) -> f64 {
    if numbers.len() > PAIRWISE_BLOCK {
        let half = numbers.len() / 2;
        let (first, second) = numbers.split_at(half - half % 8);
        return pairwise_sum(first) + pairwise_sum(second);
    }
    let (eights, rest) = numbers.as_chunks::<8>();
    let mut sum = 0.0;
    if let Some((first, others)) = eights.split_first() {
        let mut sums = *first;
        for eight in others {
            sums.iter_mut().zip(eight).for_each(|(sum, n)| *sum += n);
        }
        let [a, b, c, d, e, f, g, h] = sums;
        sum = ((a + b) + (c + d)) + ((e + f) + (g + h));
    }
    rest.iter().fold(sum, |sum, number| sum + number)
}

/// The number of samples that a source of a blend of `num_samples` contributes.
pub(super) fn target(num_samples: u64, weight: f64) -> u64 {
    (num_samples as f64 * weight).ceil() as u64
}

/// The number of samples that a source is asked for, which is more by the fraction `surplus`.
pub(super) fn asked(num_samples: u64, weight: f64, surplus: f64) -> u64 {
    (target(num_samples, weight) as f64 * (1.0 + surplus)).ceil() as u64
}

/// The order in which sources are read: each time the one of which most is missing, by its weight.
#[derive(Debug)]
pub(super) struct GreedyOrder {
    weights: Vec<f64>,
    /// Numbers of samples that were read.
    counts: Vec<u64>,
    /// The most samples to read of each; without it they are not limited.
    limits: Option<Vec<u64>>,
    index: u64,
}

impl GreedyOrder {
    /// An endless order by normalized weights.
    pub(super) fn weighted(weights: Vec<f64>) -> Self {
        Self {
            counts: vec![0; weights.len()],
            weights,
            limits: None,
            index: 0,
        }
    }

    /// An order that reads all samples of each source, in proportion to their numbers.
    pub(super) fn exhaustive(sizes: Vec<u64>) -> Self {
        let total = sizes.iter().sum::<u64>() as f64;
        let weights = sizes.iter().map(|size| *size as f64 / total).collect();
        Self {
            limits: Some(sizes),
            ..Self::weighted(weights)
        }
    }
}

/// Numbers of a source and of one of its samples.
impl Iterator for GreedyOrder {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.index.max(1) as f64;
        let mut most = f64::NEG_INFINITY;
        let mut chosen = None;
        for (source, (weight, count)) in self.weights.iter().zip(&self.counts).enumerate() {
            let limit = self.limits.as_ref().map(|limits| limits[source]);
            let missing = weight * index - *count as f64;
            if limit != Some(*count) && missing > most {
                (most, chosen) = (missing, Some(source));
            }
        }
        let source = chosen?;
        let sample = self.counts[source];
        self.counts[source] += 1;
        self.index += 1;
        Some((source, sample))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn weights_are_normalized_as_numpy_does() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
        let text = std::fs::read_to_string(format!("{folder}/megatron-order/numpy.json")).unwrap();
        let values: Value = serde_json::from_str(&text).unwrap();
        for case in values["normalized"].as_array().unwrap() {
            let numbers = |name: &str| -> Vec<f64> {
                let numbers = case[name].as_array().unwrap();
                numbers.iter().map(|n| n.as_f64().unwrap()).collect()
            };
            assert_eq!(normalize(&numbers("weights")), numbers("normalized"));
        }
    }

    proptest! {
        #[test]
        fn an_exhaustive_order_reads_every_sample_once(
            sizes in proptest::collection::vec(1u64..60, 1..9),
        ) {
            let order: Vec<_> = GreedyOrder::exhaustive(sizes.clone()).collect();
            for (source, size) in sizes.iter().enumerate() {
                let of = order.iter().filter(|(from, _)| *from == source);
                let samples: Vec<u64> = of.map(|(_, sample)| *sample).collect();
                prop_assert_eq!(samples, (0..*size).collect::<Vec<_>>());
            }
        }

        #[test]
        fn a_source_contributes_its_weight(
            weights in proptest::collection::vec(0.01f64..9.0, 1..9), length in 1usize..500,
        ) {
            let weights = normalize(&weights);
            let mut counts = vec![0.0; weights.len()];
            for (source, _) in GreedyOrder::weighted(weights.clone()).take(length) {
                counts[source] += 1.0;
            }
            for (weight, count) in weights.iter().zip(counts) {
                let difference: f64 = weight * length as f64 - count;
                prop_assert!(difference.abs() < weights.len() as f64 + 1.0, "{}", difference);
            }
        }
    }
}

//! How many candidates an n-gram has.

use super::masking_config::MaskingConfig;
use crate::megatron::random::RandomState;

/// The probability of SpanBERT's geometric distribution.
const GEOMETRIC: f64 = 0.2;

/// A distribution of the numbers 1 to the longest n-gram.
#[derive(Clone, Debug)]
pub(super) enum NgramLengths {
    /// A geometric distribution whose values are at most this number.
    Geometric(usize),
    /// The cumulative probabilities of each number.
    Drawn(Vec<f64>),
}

impl NgramLengths {
    pub(super) fn new(masking: &MaskingConfig) -> Self {
        let most = masking.max_ngram;
        if masking.geometric {
            return Self::Geometric(most);
        }
        let mut weights: Vec<f64> = (1..=most).map(|n| 1.0 / n as f64).collect();
        // Megatron-LM normalizes once here and once when it draws.
        for _ in 0..2 {
            let sum: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        if masking.longer_ngrams {
            weights.reverse();
        }
        let mut cumulative = weights;
        let mut sum = 0.0;
        for weight in &mut cumulative {
            sum += *weight;
            *weight = sum;
        }
        cumulative.iter_mut().for_each(|weight| *weight /= sum);
        Self::Drawn(cumulative)
    }

    /// Draws a number, which is at least 1.
    pub(super) fn draw(&self, random: &mut RandomState) -> usize {
        match self {
            Self::Geometric(most) => random.geometric(GEOMETRIC).clamp(1, *most as u64) as usize,
            Self::Drawn(cumulative) => {
                // The last cumulative probability is 1, which is above all that is drawn.
                1 + random.choice(cumulative).min(cumulative.len() - 1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_drawn_with_their_probabilities() {
        let masking = MaskingConfig::new(0.15);
        let geometric: Vec<f64> = vec![0.2, 0.2 * 0.8, 0.2 * 0.64, 0.8f64.powi(3)];
        for (masking, expected) in [
            (masking.clone(), vec![6.0 / 11.0, 3.0 / 11.0, 2.0 / 11.0]),
            (
                masking.clone().with_longer_ngrams(true).with_max_ngram(2),
                vec![1.0 / 3.0, 2.0 / 3.0],
            ),
            (
                masking.clone().with_geometric(true).with_max_ngram(4),
                geometric,
            ),
            (masking.with_max_ngram(1), vec![1.0]),
        ] {
            let lengths = NgramLengths::new(&masking);
            let mut random = RandomState::new(fastrand::u32(..));
            let mut counts = vec![0.0; expected.len()];
            for _ in 0..20_000 {
                counts[lengths.draw(&mut random) - 1] += 1.0 / 20_000.0;
            }
            for (found, expected) in counts.iter().zip(&expected) {
                assert!((found - expected).abs() < 0.025, "{counts:?}, {expected:?}");
            }
        }
    }
}

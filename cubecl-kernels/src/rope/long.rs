//! Rotary frequencies that depend on the length of the sequence: longrope and dynamic NTK.

use burn::config::Config;

use super::checks::check;
use crate::error::KernelError;

/// LongRoPE (Ding et al., 2024, arXiv:2402.13753; `rope_type: longrope` of Hugging Face's
/// `modeling_rope_utils.py`, as in Phi-3): each frequency is divided by a factor of its own. Sequences
/// longer than those of pre-training have other factors.
///
/// Rotated vectors are multiplied by [`table_factor`](Self::table_factor), whatever the length.
#[derive(Config, Debug, PartialEq)]
pub struct LongRopeScaling {
    /// The divisors for sequences of at most `original_max_position` positions, one for each pair of
    /// rotated elements.
    pub short_factor: Vec<f64>,
    /// The divisors for longer sequences.
    pub long_factor: Vec<f64>,
    /// The context length of pre-training, in positions.
    pub original_max_position: usize,
    /// The ratio of the context to the original one.
    pub factor: f64,
    /// The factor of the table; by default it follows from `factor`.
    pub attention_factor: Option<f64>,
}

impl LongRopeScaling {
    /// The factor of cosines and sines, by default `sqrt(1 + ln(factor) / ln(original))`.
    pub fn table_factor(&self) -> f64 {
        let growth = if self.factor <= 1.0 {
            1.0
        } else {
            (1.0 + self.factor.ln() / (self.original_max_position as f64).ln()).sqrt()
        };
        self.attention_factor.unwrap_or(growth)
    }

    pub(super) fn check(&self) -> Result<(), KernelError> {
        check("scaling factor", self.factor, 0.0)?;
        // The factor of the table divides by its logarithm.
        check(
            "original_max_position",
            self.original_max_position as f64,
            1.0,
        )?;
        check("attention_factor", self.table_factor(), 0.0)?;
        for (name, factors) in [
            ("short_factor", &self.short_factor),
            ("long_factor", &self.long_factor),
        ] {
            factors
                .iter()
                .try_for_each(|factor| check(name, *factor, 0.0))?;
        }
        Ok(())
    }

    /// Checks that there is a divisor for each of `pairs` pairs.
    pub(super) fn check_pairs(&self, pairs: usize) -> Result<(), KernelError> {
        for (name, factors) in [
            ("short_factor", &self.short_factor),
            ("long_factor", &self.long_factor),
        ] {
            if factors.len() != pairs {
                return Err(KernelError::RopeFactors {
                    name,
                    found: factors.len(),
                    pairs,
                });
            }
        }
        Ok(())
    }

    /// Scales the plain frequencies of pairs, for sequences of `len` positions.
    pub(super) fn apply(&self, frequencies: &[f64], len: usize) -> Vec<f64> {
        let factors = if len > self.original_max_position {
            &self.long_factor
        } else {
            &self.short_factor
        };
        let both = frequencies.iter().zip(factors);
        both.map(|(frequency, factor)| frequency / factor).collect()
    }
}

/// The base of dynamic NTK scaling (`rope_type: dynamic` of Hugging Face's `modeling_rope_utils.py`)
/// for sequences of `len` positions, where `d` elements are rotated: it grows with the length beyond
/// `original`.
pub(super) fn dynamic_base(theta: f64, factor: f64, original: usize, len: usize, d: usize) -> f64 {
    let ratio = len.max(original) as f64 / original as f64;
    let growth = factor * ratio - (factor - 1.0);
    theta * growth.powf(d as f64 / (d as f64 - 2.0))
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{device, values};
    use rstest::rstest;

    use super::*;
    use crate::{RopeConfig, RopeScaling};

    fn long() -> LongRopeScaling {
        LongRopeScaling::new(vec![1.0, 2.0], vec![4.0, 8.0], 16, 4.0)
    }

    // From Python: 100.0 ** -(2 * i / 4) divided by the factors; sqrt(1 + ln(4) / ln(16)).
    #[rstest]
    #[case(16, [1.0, 0.05])]
    #[case(17, [0.25, 0.0125])]
    fn the_length_chooses_the_factors(#[case] len: usize, #[case] expected: [f64; 2]) {
        let rope = RopeConfig::new(4)
            .with_theta(100.0)
            .with_scaling(RopeScaling::Long(long()));
        let found = rope.frequencies_at(len).unwrap();
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-12,
                "{found} is not {expected}"
            );
        }
        let table = rope.init_at([(3, len)], &device()).unwrap();
        let cos = values(table.cos().clone());
        let factor = 1.5f64.sqrt();
        assert!((cos[0] - factor * (3.0 * expected[0]).cos()).abs() < 1e-6);
    }

    /// From Python: `10000.0 * ((2 * 48 / 32) - 1) ** (8 / 6)`, to the power of `-2 i / 8`.
    #[rstest]
    #[case(8, [1.0, 0.1, 0.01, 0.001])]
    #[case(32, [1.0, 0.1, 0.01, 0.001])]
    #[case(48, [1.0, 0.079_370_052_598_409_97, 0.006_299_605_249_474_365, 0.000_5])]
    fn the_base_grows_with_the_length(#[case] len: usize, #[case] expected: [f64; 4]) {
        let rope = RopeConfig::new(8).with_scaling(RopeScaling::Dynamic {
            factor: 2.0,
            original_max_position: 32,
        });
        let found = rope.frequencies_at(len).unwrap();
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-12,
                "{found} is not {expected}"
            );
        }
    }

    #[rstest]
    #[case(LongRopeScaling { short_factor: vec![1.0], ..long() }, "short_factor has 1 elements for 2 pairs")]
    #[case(LongRopeScaling { long_factor: vec![1.0; 3], ..long() }, "long_factor has 3 elements for 2 pairs")]
    #[case(LongRopeScaling { long_factor: vec![1.0, 0.0], ..long() }, "long_factor is 0")]
    #[case(LongRopeScaling { original_max_position: 1, ..long() }, "original_max_position is 1")]
    fn what_cannot_be_is_refused(#[case] scaling: LongRopeScaling, #[case] message: &str) {
        let rope = RopeConfig::new(4).with_scaling(RopeScaling::Long(scaling));
        let error = rope.frequencies().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

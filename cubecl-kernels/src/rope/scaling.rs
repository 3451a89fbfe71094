use std::f64::consts::TAU;

use burn::config::Config;

use super::checks::check;
use super::long::{LongRopeScaling, dynamic_base};
use super::yarn::YarnScaling;
use crate::error::KernelError;

/// How rotary frequencies are scaled for contexts longer than the one trained on.
#[derive(Config, Debug, PartialEq)]
pub enum RopeScaling {
    /// Unscaled frequencies.
    None,
    /// All frequencies divided by `factor`: positions are interpolated (Chen et al., 2023,
    /// arXiv:2306.15595).
    Linear {
        /// The ratio of the context to the original one.
        factor: f64,
    },
    /// Llama 3.1's rule (`rope_type: llama3` in Hugging Face's `modeling_rope_utils.py`,
    /// `rope_scaling` in Megatron's `rotary_pos_embedding.py`).
    ///
    /// Wavelengths above `original_max_position / low_freq_factor` are multiplied by `factor`,
    /// those below `original_max_position / high_freq_factor` are kept. In between, frequencies are
    /// interpolated linearly in the number of turns.
    Llama3 {
        /// The ratio of the context to the original one.
        factor: f64,
        /// Frequencies with fewer turns than this within the original context are fully scaled.
        low_freq_factor: f64,
        /// Frequencies with more turns than this within the original context are kept.
        high_freq_factor: f64,
        /// The context length trained on, in positions.
        original_max_position: usize,
    },
    /// YaRN: a ramp over the pairs of elements, and a factor on the vectors (DeepSeek, Qwen).
    Yarn(YarnScaling),
    /// LongRoPE: divisors of each frequency, which depend on the length of the sequence (Phi-3).
    Long(LongRopeScaling),
    /// Dynamic NTK: the base grows with the length of sequences beyond the original one
    /// (`rope_type: dynamic` in Hugging Face's `modeling_rope_utils.py`).
    Dynamic {
        /// How fast the base grows.
        factor: f64,
        /// The context length trained on, in positions.
        original_max_position: usize,
    },
}

impl RopeScaling {
    /// The factor of cosines and sines.
    pub(super) fn table_factor(&self) -> f64 {
        match self {
            Self::Yarn(yarn) => yarn.table_factor(),
            Self::Long(long) => long.table_factor(),
            _ => 1.0,
        }
    }

    pub(super) fn check(&self, theta: f64) -> Result<(), KernelError> {
        match *self {
            Self::None => Ok(()),
            Self::Linear { factor } => check("scaling factor", factor, 0.0),
            Self::Yarn(ref yarn) => yarn.check(theta),
            Self::Long(ref long) => long.check(),
            Self::Dynamic {
                factor,
                original_max_position,
            } => {
                check("scaling factor", factor, 0.0)?;
                check("original_max_position", original_max_position as f64, 0.0)
            }
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => {
                check("scaling factor", factor, 0.0)?;
                check("low_freq_factor", low_freq_factor, 0.0)?;
                check("high_freq_factor", high_freq_factor, low_freq_factor)?;
                check("original_max_position", original_max_position as f64, 0.0)
            }
        }
    }

    /// The base of the frequencies of `d` rotated elements in sequences of `len` positions.
    pub(super) fn base(&self, theta: f64, len: usize, d: usize) -> f64 {
        match *self {
            Self::Dynamic {
                factor,
                original_max_position,
            } if d > 2 => dynamic_base(theta, factor, original_max_position, len, d),
            _ => theta,
        }
    }

    /// Scales the plain frequencies of pairs, whose base is `theta`, in sequences of `len` positions.
    pub(super) fn apply(&self, theta: f64, frequencies: Vec<f64>, len: usize) -> Vec<f64> {
        let each = |scaled: &dyn Fn(f64) -> f64| frequencies.iter().copied().map(scaled).collect();
        match *self {
            Self::None | Self::Dynamic { .. } => frequencies,
            Self::Linear { factor } => each(&|frequency| frequency / factor),
            Self::Yarn(ref yarn) => yarn.apply(theta, frequencies),
            Self::Long(ref long) => long.apply(&frequencies, len),
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => each(&|frequency| {
                let turns = original_max_position as f64 * frequency / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::RopeConfig;

    #[test]
    fn linear_scaling_puts_positions_closer_together() {
        let plain = RopeConfig::new(8).frequencies().unwrap();
        let scaled = RopeConfig::new(8).with_scaling(RopeScaling::Linear { factor: 4.0 });
        let scaled = scaled.frequencies().unwrap();
        assert!(
            plain
                .iter()
                .zip(&scaled)
                .all(|(plain, scaled)| *plain == scaled * 4.0)
        );
    }

    fn llama3(factor: f64, original_max_position: usize) -> RopeScaling {
        let low_freq_factor = 1.0;
        let high_freq_factor = 4.0;
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        }
    }

    // Expected values from Python, with the rule in wavelengths as in Hugging Face:
    //   f = theta ** (-2 * i / d); wave = 2 * pi / f
    //   if wave > old / low: f /= factor
    //   elif wave >= old / high:
    //       smooth = (old / wave - low) / (high - low); f = (1 - smooth) * f / factor + smooth * f
    #[rstest]
    #[case::plain(8, RopeScaling::None, 0, &[1.0, 0.03760603093086393, 0.001414213562373095, 5.318295896944988e-05])]
    // The `llama3-scaled` fixture: one frequency is kept, three are fully scaled.
    #[case::fixture(8, llama3(8.0, 32), 0, &[1.0, 0.004700753866357992, 0.00017677669529663688, 6.647869871181235e-06])]
    // Llama 3.1, head size 128: the last kept frequency, the interpolated band, the first fully
    // scaled.
    #[case::llama31(128, llama3(8.0, 8192), 28, &[
        0.003211445994752591, 0.002166570763503359, 0.0013718935677611381, 0.0008567514129196321,
        0.0005248461609929547, 0.00031269375038406517, 0.0001785078127679964, 9.556212353964683e-05,
        7.78465527393245e-05, 6.341514345777615e-05,
    ])]
    fn frequencies_are_those_of_hugging_face(
        #[case] head_dim: usize,
        #[case] scaling: RopeScaling,
        #[case] skip: usize,
        #[case] expected: &[f64],
    ) {
        let config = RopeConfig::new(head_dim)
            .with_theta(500_000.0)
            .with_scaling(scaling);
        let frequencies = config.frequencies().unwrap();
        assert_eq!(frequencies.len(), head_dim / 2);
        for (a, b) in frequencies[skip..].iter().zip(expected) {
            assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        }
    }

    #[test]
    fn a_band_without_width_is_refused() {
        let factor = 8.0;
        let original_max_position = 32;
        let low_freq_factor = 4.0;
        let high_freq_factor = 4.0;
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        };
        let error = RopeConfig::new(8)
            .with_scaling(scaling)
            .frequencies()
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("high_freq_factor is 4, but must be a finite number greater than 4")
        );
    }

    #[rstest]
    #[case(llama3(f64::NAN, 32), "factor is NaN")]
    #[case(llama3(8.0, 0), "original_max_position is 0")]
    fn parameters_that_cannot_be_are_refused(#[case] scaling: RopeScaling, #[case] message: &str) {
        let error = RopeConfig::new(8)
            .with_scaling(scaling)
            .frequencies()
            .unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

//! YaRN: rotary frequencies for contexts longer than those trained on.

use std::f64::consts::TAU;

use burn::config::Config;

use super::checks::check;
use crate::error::KernelError;

/// YaRN scaling (Peng et al., 2023, arXiv:2309.00071; `rope_type: yarn` of Hugging Face's
/// `modeling_rope_utils.py`, DeepSeek's `DeepseekV3YarnRotaryEmbedding`).
///
/// Frequencies with many turns within the original context are kept, and those with few are divided
/// by `factor`; in between there is a ramp over the pairs of elements. Rotated vectors are
/// multiplied by [`table_factor`](Self::table_factor).
///
/// In DeepSeek-V3, scores must also be scaled by [`score_factor`](Self::score_factor):
///
/// ```
/// use megaburn_kernels::{RopeConfig, RopeLayout, RopeScaling, YarnScaling};
///
/// let yarn = YarnScaling::new(40.0, 4096).with_mscale(Some(1.0)).with_mscale_all_dim(Some(1.0));
/// assert_eq!(yarn.table_factor(), 1.0);
/// let scale = 192f64.powf(-0.5) * yarn.score_factor();
/// let rope = RopeConfig::new(64)
///     .with_scaling(RopeScaling::Yarn(yarn))
///     .with_layout(RopeLayout::Interleaved);
/// # assert!(rope.frequencies().is_ok() && scale > 0.13);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct YarnScaling {
    /// The ratio of the context to the original one.
    pub factor: f64,
    /// The context length trained on, in positions.
    pub original_max_position: usize,
    /// Frequencies with at least this many turns within the original context are kept.
    #[config(default = 32.0)]
    pub beta_fast: f64,
    /// Frequencies with at most this many turns within the original context are fully divided.
    #[config(default = 1.0)]
    pub beta_slow: f64,
    /// How much the rotated vectors grow with the logarithm of `factor`. Used only if
    /// `mscale_all_dim` is given too; zeros count as not given.
    pub mscale: Option<f64>,
    /// The part of that growth which applies to scores instead of the rotated vectors.
    pub mscale_all_dim: Option<f64>,
    /// The factor of the table; by default it follows from `mscale` and `mscale_all_dim`.
    pub attention_factor: Option<f64>,
    /// Whether the ramp's ends are rounded to whole pairs.
    #[config(default = true)]
    pub truncate: bool,
}

impl YarnScaling {
    /// The factor of cosines and sines (Hugging Face's `attention_factor`), which applies to both
    /// rotated queries and rotated keys.
    pub fn table_factor(&self) -> f64 {
        let given = |x: Option<f64>| x.filter(|x| *x != 0.0);
        let growth = match (given(self.mscale), given(self.mscale_all_dim)) {
            (Some(mscale), Some(all)) => self.growth(mscale) / self.growth(all),
            _ => self.growth(1.0),
        };
        self.attention_factor.unwrap_or(growth)
    }

    /// The factor by which DeepSeek multiplies the softmax scale, for rotated and unrotated
    /// features; 1 without `mscale_all_dim`. Other models do not use it.
    pub fn score_factor(&self) -> f64 {
        self.mscale_all_dim
            .map_or(1.0, |all| self.growth(all).powi(2))
    }

    /// DeepSeek's `yarn_get_mscale` for `factor`.
    fn growth(&self, mscale: f64) -> f64 {
        if self.factor <= 1.0 {
            1.0
        } else {
            0.1 * mscale * self.factor.ln() + 1.0
        }
    }

    pub(super) fn check(&self, theta: f64) -> Result<(), KernelError> {
        check("theta", theta, 1.0)?;
        check("scaling factor", self.factor, 0.0)?;
        check(
            "original_max_position",
            self.original_max_position as f64,
            0.0,
        )?;
        check("beta_slow", self.beta_slow, 0.0)?;
        check("beta_fast", self.beta_fast, self.beta_slow)?;
        check("attention_factor", self.table_factor(), 0.0)?;
        check("the softmax scale factor", self.score_factor(), 0.0)
    }

    /// Scales the plain frequencies of pairs.
    pub(super) fn apply(&self, theta: f64, frequencies: Vec<f64>) -> Vec<f64> {
        let d = (2 * frequencies.len()) as f64;
        // The pair with this number of turns within the original context.
        let pair = |turns: f64| {
            d * (self.original_max_position as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let mut first = pair(self.beta_fast);
        let mut last = pair(self.beta_slow);
        if self.truncate {
            first = first.floor();
            last = last.ceil();
        }
        // Clamped to the number of elements, not of pairs, as in Hugging Face and DeepSeek.
        first = first.max(0.0);
        last = last.min(d - 1.0);
        // As in Hugging Face: avoids a division by 0 below.
        if first == last {
            last += 0.001;
        }
        let scaled = |(i, frequency): (usize, f64)| {
            let divided = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
            frequency * (1.0 - divided) + frequency / self.factor * divided
        };
        frequencies.into_iter().enumerate().map(scaled).collect()
    }
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{device, values};
    use rstest::rstest;

    use super::*;
    use crate::{RopeConfig, RopeScaling};

    fn yarn(factor: f64, original: usize, [mscale, all]: [Option<f64>; 2]) -> YarnScaling {
        YarnScaling::new(factor, original)
            .with_mscale(mscale)
            .with_mscale_all_dim(all)
    }

    fn config(head_dim: usize, theta: f64, yarn: YarnScaling) -> RopeConfig {
        RopeConfig::new(head_dim)
            .with_theta(theta)
            .with_scaling(RopeScaling::Yarn(yarn))
    }

    // Expected values from Python: `_compute_yarn_parameters` of Hugging Face's
    // `modeling_rope_utils.py`, transcribed to f64.
    #[rstest]
    // DeepSeek-V3: a kept frequency, the ramp, and a fully divided one.
    #[case::deepseek((64, 1e4), yarn(40.0, 4096, [Some(1.0); 2]), 10, &[
        0.056234132519034905, 0.03900692656714386, 0.026879360111431223, 0.018378146218877827,
        0.01244795587027246, 0.008334508951020777, 0.0055, 0.0035619974943291656,
        0.002249365300761396, 0.0013705136361428923, 0.0007905694150420945, 0.00041499039849078964,
        0.0001778279410038922, 3.33380358040831e-05, 2.5e-05,
    ])]
    #[case::heads_of_128((128, 1e6), yarn(4.0, 32768, [None; 2]), 38, &[
        9.262301704129459e-05, 6.490394320837028e-05, 4.445698525097307e-05, 3.582531425592407e-05,
    ])]
    #[case::no_whole_pairs((16, 15e4), yarn(32.0, 4096, [None; 2]).with_truncate(false), 0, &[
        1.0, 0.2254180002028708, 0.050813274815461475, 0.006794959489732219, 0.00045648391922324086,
        1.818833668168956e-05, 4.0999784818029795e-06, 9.242089502428301e-07,
    ])]
    #[case::short((8, 1e4), yarn(4.0, 6, [None; 2]), 0, &[1.0, 0.025, 0.0025, 0.00025])]
    fn frequencies_are_those_of_hugging_face(
        #[case] (head_dim, theta): (usize, f64),
        #[case] yarn: YarnScaling,
        #[case] skip: usize,
        #[case] expected: &[f64],
    ) {
        let frequencies = config(head_dim, theta, yarn).frequencies().unwrap();
        assert_eq!(frequencies.len(), head_dim / 2);
        for (a, b) in frequencies[skip..].iter().zip(expected) {
            assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        }
    }

    // Expected values from the same transcription.
    #[rstest]
    #[case::deepseek_v3([Some(1.0), Some(1.0)], 1.0, 1.8738542070926265)]
    #[case::deepseek_v2([Some(0.707), Some(0.707)], 1.0, 1.5896261651208736)]
    #[case::two([Some(1.0), Some(0.5)], 1.1557219901962608, 1.4029075244788534)]
    #[case::none([None, None], 1.3688879454113936, 1.0)]
    #[case::one_of_both([Some(0.5), None], 1.3688879454113936, 1.0)]
    #[case::zeros([Some(0.0), Some(0.0)], 1.3688879454113936, 1.0)]
    fn factors_are_those_of_hugging_face(
        #[case] mscales: [Option<f64>; 2],
        #[case] table: f64,
        #[case] score: f64,
    ) {
        let yarn = yarn(40.0, 4096, mscales);
        assert!(
            (yarn.table_factor() / table - 1.0).abs() < 1e-14,
            "{}",
            yarn.table_factor()
        );
        assert!(
            (yarn.score_factor() / score - 1.0).abs() < 1e-14,
            "{}",
            yarn.score_factor()
        );
        let shorter = YarnScaling {
            factor: 0.5,
            ..yarn.clone()
        };
        assert_eq!([shorter.table_factor(), shorter.score_factor()], [1.0; 2]);
        assert_eq!(yarn.with_attention_factor(Some(1.25)).table_factor(), 1.25);
    }

    #[test]
    fn a_table_is_multiplied_by_its_factor() {
        let long = yarn(4.0, 64, [None; 2]).with_attention_factor(Some(1.25));
        let plain = yarn(4.0, 64, [None; 2]).with_attention_factor(Some(1.0));
        let [long, plain] = [long, plain].map(|yarn| config(8, 1e4, yarn).init(0..5, &device()));
        let long = long.unwrap();
        let plain = plain.unwrap();
        for (long, plain) in [(long.cos(), plain.cos()), (long.sin(), plain.sin())] {
            let pairs = values(long.clone()).into_iter().zip(values(plain.clone()));
            pairs.for_each(|(long, plain)| assert!((long - 1.25 * plain).abs() < 1e-7));
        }
    }

    #[rstest]
    #[case(1e4, YarnScaling::new(0.0, 64), "factor is 0")]
    #[case(
        1.0,
        YarnScaling::new(4.0, 64),
        "theta is 1, but must be a finite number greater than 1"
    )]
    #[case(1e4, YarnScaling::new(4.0, 0), "original_max_position is 0")]
    #[case(1e4, YarnScaling::new(4.0, 64).with_beta_slow(0.0), "beta_slow is 0")]
    #[case(1e4, YarnScaling::new(4.0, 64).with_beta_fast(1.0), "beta_fast is 1, but must be a finite number greater than 1")]
    #[case(1e4, YarnScaling::new(4.0, 64).with_attention_factor(Some(f64::NAN)), "attention_factor is NaN")]
    #[case(1e4, yarn(4.0, 64, [None, Some(f64::INFINITY)]), "the softmax scale factor is inf")]
    fn parameters_that_cannot_be_are_refused(
        #[case] theta: f64,
        #[case] yarn: YarnScaling,
        #[case] message: &str,
    ) {
        let error = config(8, theta, yarn).frequencies().unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }

    #[test]
    fn a_configuration_is_read_as_it_is_written() {
        use burn::config::{Config, config_to_json};
        let config = config(
            8,
            1e4,
            yarn(4.0, 64, [Some(0.7), None]).with_truncate(false),
        );
        let read = RopeConfig::load_binary(config_to_json(&config).as_bytes()).unwrap();
        assert_eq!(read, config);
    }
}

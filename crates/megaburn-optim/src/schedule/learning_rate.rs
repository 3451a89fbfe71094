use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The learning rate: a linear warm-up, then a decay from `max` to `min`. It is a pure function of
/// the number of samples that all updates so far have consumed.
///
/// Source: Megatron-LM `megatron/core/optimizer_param_scheduler.py`, `get_lr`.
///
/// ```
/// use megaburn_optim::{Decay, LrSchedule};
///
/// let schedule = LrSchedule {
///     init: 0.0,
///     max: 0.1,
///     min: 0.01,
///     warmup_samples: 10,
///     decay_samples: 110,
///     decay: Decay::Cosine,
/// };
/// assert_eq!(schedule.lr(0), 0.0);
/// assert_eq!(schedule.lr(10), 0.1);
/// assert!((schedule.lr(60) - 0.055).abs() < 1e-12);
/// assert_eq!(schedule.lr(111), 0.01);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LrSchedule {
    /// Rate at 0 samples.
    pub init: f64,
    /// Rate at the end of the warm-up.
    pub max: f64,
    /// Rate after `decay_samples`.
    pub min: f64,
    /// Samples over which the rate grows from `init` to `max`. With 0, the rate starts at `max`.
    pub warmup_samples: u64,
    /// Samples, warm-up included, after which the rate is `min`. Must exceed `warmup_samples`.
    pub decay_samples: u64,
    /// How the rate falls in between.
    pub decay: Decay,
}

/// How a learning rate falls (Megatron's `--lr-decay-style`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// The rate stays at `max`, after `decay_samples` too.
    Constant,
    /// Linear in the samples.
    Linear,
    /// Half a cosine.
    Cosine,
    /// `max * sqrt(warmup_samples / samples)`, never below `min`. Without a warm-up,
    /// `warmup_samples` counts as 1.
    InverseSquareRoot,
    /// Constant until the last `samples`, then decaying: warm-up, stable, decay.
    Wsd {
        /// Samples of the decay.
        samples: u64,
        /// Shape of the decay.
        style: WsdStyle,
    },
}

/// The shape of the decay at the end of a warm-up-stable-decay schedule (Megatron's
/// `--lr-wsd-decay-style`), as a function of its elapsed fraction `r`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum WsdStyle {
    /// `2 * 0.5^r - 1`, where `r` is the elapsed fraction of the decay.
    #[default]
    Exponential,
    /// `1 - r`.
    Linear,
    /// `(cos(pi r) + 1) / 2`.
    Cosine,
    /// `1 - sqrt(r)`.
    MinusSqrt,
}

impl LrSchedule {
    /// The rate after `samples` samples. An update uses the rate after its own samples, so that the
    /// first one already moves the weights; Megatron uses the rate before them.
    pub fn lr(&self, samples: u64) -> f64 {
        let Self {
            init,
            max,
            min,
            warmup_samples,
            decay_samples,
            decay,
        } = *self;
        if samples < warmup_samples {
            return init + (max - init) * samples as f64 / warmup_samples as f64;
        }
        if decay == Decay::Constant {
            return max;
        }
        if samples > decay_samples {
            return min;
        }
        let passed = (samples - warmup_samples) as f64;
        let ratio = passed / (decay_samples - warmup_samples) as f64;
        let part = match decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - ratio,
            Decay::Cosine => half_cosine(ratio),
            Decay::InverseSquareRoot => {
                let [unit, samples] = [warmup_samples, samples].map(|n| n.max(1) as f64);
                return (max * (unit / samples).sqrt()).max(min);
            }
            Decay::Wsd {
                samples: last,
                style,
            } => {
                let stable = decay_samples.saturating_sub(last);
                match samples.checked_sub(stable) {
                    Some(passed) if last > 0 => style.part(passed as f64 / last as f64),
                    _ => 1.0,
                }
            }
        };
        // `min + (max - min)` may differ from `max` by rounding; return exactly `max` before the
        // decay.
        if part == 1.0 {
            max
        } else {
            min + (max - min) * part
        }
    }
}

impl WsdStyle {
    fn part(self, ratio: f64) -> f64 {
        match self {
            Self::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
            Self::Linear => 1.0 - ratio,
            Self::Cosine => half_cosine(ratio),
            Self::MinusSqrt => 1.0 - ratio.sqrt(),
        }
    }
}

/// Falls from 1 at 0 to 0 at 1.
pub(super) fn half_cosine(ratio: f64) -> f64 {
    0.5 * ((PI * ratio).cos() + 1.0)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    // The values of Megatron's `tests/unit_tests/test_optimizer_param_scheduler.py`.
    const MEGATRON: LrSchedule = LrSchedule {
        init: 0.01,
        max: 0.1,
        min: 0.001,
        warmup_samples: 100,
        decay_samples: 1000,
        decay: Decay::Cosine,
    };

    const fn wsd(style: WsdStyle) -> Decay {
        Decay::Wsd {
            samples: 200,
            style,
        }
    }

    #[rstest]
    #[case(Decay::Constant, 50, 0.055)]
    #[case(Decay::Constant, 500, 0.1)]
    #[case(Decay::Constant, 5000, 0.1)]
    #[case(Decay::Linear, 0, 0.01)]
    #[case(Decay::Linear, 50, 0.055)]
    #[case(Decay::Linear, 100, 0.1)]
    #[case(Decay::Linear, 500, 0.1 - 0.099 * 400.0 / 900.0)]
    #[case(Decay::Linear, 1000, 0.001)]
    #[case(Decay::Linear, 1001, 0.001)]
    #[case(Decay::Cosine, 0, 0.01)]
    #[case(Decay::Cosine, 50, 0.055)]
    #[case(Decay::Cosine, 100, 0.1)]
    #[case(Decay::Cosine, 500, 0.001 + 0.099 * 0.5 * ((PI * 400.0 / 900.0).cos() + 1.0))]
    #[case(Decay::Cosine, 1000, 0.001)]
    #[case(Decay::Cosine, 1001, 0.001)]
    #[case(Decay::Cosine, u64::MAX, 0.001)]
    #[case(Decay::InverseSquareRoot, 50, 0.055)]
    #[case(Decay::InverseSquareRoot, 100, 0.1)]
    #[case(Decay::InverseSquareRoot, 400, 0.05)]
    #[case(Decay::InverseSquareRoot, 1000, 0.1 * 0.1f64.sqrt())]
    #[case(Decay::InverseSquareRoot, 1001, 0.001)]
    #[case(wsd(WsdStyle::Linear), 100, 0.1)]
    #[case(wsd(WsdStyle::Linear), 800, 0.1)]
    #[case(wsd(WsdStyle::Linear), 850, 0.001 + 0.099 * 0.75)]
    #[case(wsd(WsdStyle::Cosine), 850, 0.001 + 0.099 * 0.5 * ((PI * 0.25).cos() + 1.0))]
    #[case(wsd(WsdStyle::Exponential), 850, 0.001 + 0.099 * (2.0 * 0.5f64.powf(0.25) - 1.0))]
    #[case(wsd(WsdStyle::MinusSqrt), 850, 0.001 + 0.099 * 0.5)]
    #[case(wsd(WsdStyle::Exponential), 1000, 0.001)]
    #[case(wsd(WsdStyle::MinusSqrt), 1001, 0.001)]
    fn rates_are_megatrons(#[case] decay: Decay, #[case] samples: u64, #[case] expected: f64) {
        let lr = LrSchedule { decay, ..MEGATRON }.lr(samples);
        assert!((lr - expected).abs() < 1e-15, "{lr} is not {expected}");
    }

    #[test]
    fn without_warm_up_the_rate_starts_at_its_maximum() {
        for decay in [Decay::Linear, Decay::Cosine, Decay::InverseSquareRoot] {
            let schedule = LrSchedule {
                warmup_samples: 0,
                decay,
                ..MEGATRON
            };
            assert_eq!(schedule.lr(0), 0.1);
            assert!(schedule.lr(2) < 0.1);
        }
    }

    #[test]
    fn an_inverse_square_root_never_falls_below_the_minimum() {
        let schedule = LrSchedule {
            decay: Decay::InverseSquareRoot,
            min: 0.06,
            ..MEGATRON
        };
        assert!(schedule.lr(200) > 0.06);
        assert_eq!(schedule.lr(900), 0.06);
    }

    #[test]
    fn a_fall_of_no_samples_is_a_step() {
        let decay = Decay::Wsd {
            samples: 0,
            style: WsdStyle::Linear,
        };
        let schedule = LrSchedule { decay, ..MEGATRON };
        assert_eq!(
            [1000, 1001].map(|samples| schedule.lr(samples)),
            [0.1, 0.001]
        );
    }

    #[rstest]
    #[case(Decay::Linear, 100)]
    #[case(Decay::Cosine, 100)]
    #[case(Decay::InverseSquareRoot, 100)]
    #[case(wsd(WsdStyle::Exponential), 800)]
    #[case(wsd(WsdStyle::Linear), 800)]
    #[case(wsd(WsdStyle::Cosine), 800)]
    #[case(wsd(WsdStyle::MinusSqrt), 800)]
    fn the_rate_rises_then_stays_then_falls(#[case] decay: Decay, #[case] falls_from: u64) {
        let schedule = LrSchedule { decay, ..MEGATRON };
        for samples in 0..1000 {
            let [now, next] = [samples, samples + 1].map(|samples| schedule.lr(samples));
            let text = format!("after {samples} samples: {now}, then {next}");
            match samples {
                0..100 => assert!(now < next, "{text}"),
                _ if samples < falls_from => assert!(now == next, "{text}"),
                _ => assert!(now > next, "{text}"),
            }
        }
    }
}

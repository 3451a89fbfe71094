use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::learning_rate::half_cosine;

/// Weight decay that changes from one value to another over a run. It is a pure function of the
/// number of samples that all updates so far have consumed.
///
/// Source: Megatron-LM `megatron/core/optimizer_param_scheduler.py`, `get_wd`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightDecaySchedule {
    /// Weight decay at 0 samples.
    pub start: f64,
    /// Weight decay from `samples` on.
    pub end: f64,
    /// Samples over which the weight decay changes.
    pub samples: u64,
    /// How the weight decay changes in between.
    pub style: WeightDecayStyle,
}

/// How weight decay changes (Megatron's `--weight-decay-incr-style`; equal ends make it constant).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum WeightDecayStyle {
    /// Linear in the samples.
    #[default]
    Linear,
    /// Half a cosine.
    Cosine,
}

impl WeightDecaySchedule {
    /// A weight decay that never changes.
    pub fn constant(weight_decay: f64) -> Self {
        let style = WeightDecayStyle::default();
        Self {
            start: weight_decay,
            end: weight_decay,
            samples: 0,
            style,
        }
    }

    /// The weight decay after `samples` samples.
    pub fn weight_decay(&self, samples: u64) -> f64 {
        if samples >= self.samples {
            return self.end;
        }
        let ratio = samples as f64 / self.samples as f64;
        let part = match self.style {
            WeightDecayStyle::Linear => ratio,
            WeightDecayStyle::Cosine => half_cosine(1.0 - ratio),
        };
        self.start + (self.end - self.start) * part
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use rstest::rstest;

    use super::*;

    // The values of Megatron's `tests/unit_tests/test_optimizer_param_scheduler.py`.
    #[rstest]
    #[case(WeightDecayStyle::Linear, 0.0, 0.05)]
    #[case(WeightDecayStyle::Cosine, 0.0, 0.05 * ((PI * 0.5).cos() + 1.0))]
    #[case(WeightDecayStyle::Linear, 0.1, 0.1)]
    fn the_middle_is_megatrons(
        #[case] style: WeightDecayStyle,
        #[case] start: f64,
        #[case] middle: f64,
    ) {
        let schedule = WeightDecaySchedule {
            start,
            end: 0.1,
            samples: 1000,
            style,
        };
        for (samples, expected) in [(0, start), (500, middle), (1000, 0.1), (u64::MAX, 0.1)] {
            let found = schedule.weight_decay(samples);
            assert!(
                (found - expected).abs() < 1e-15,
                "{samples}: {found} is not {expected}"
            );
        }
    }

    #[test]
    fn it_may_fall_and_be_constant() {
        let style = WeightDecayStyle::Cosine;
        let falls = WeightDecaySchedule {
            start: 0.1,
            end: 0.0,
            samples: 100,
            style,
        };
        assert!((0..100).all(|at| falls.weight_decay(at + 1) < falls.weight_decay(at)));
        let constant = WeightDecaySchedule::constant(0.3);
        assert_eq!(
            [0, 7, u64::MAX].map(|at| constant.weight_decay(at)),
            [0.3; 3]
        );
    }
}

//! The learning rate of a step.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// Linear warm-up, then a half cosine down to a floor: a pure function of the number of updates
/// done, so that a resumed run needs no state.
///
/// Source: Megatron-LM `megatron/core/optimizer_param_scheduler.py`, decay style `cosine`.
///
/// ```
/// use megaburn_train::schedule::LrSchedule;
///
/// let schedule = LrSchedule { init: 0.0, max: 0.1, min: 0.01, warmup_steps: 10, decay_steps: 110 };
/// assert_eq!(schedule.lr(0), 0.0);
/// assert_eq!(schedule.lr(10), 0.1);
/// assert!((schedule.lr(60) - 0.055).abs() < 1e-12);
/// assert_eq!(schedule.lr(111), 0.01);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LrSchedule {
    /// Rate at 0 updates.
    pub init: f64,
    /// Rate at the end of the warm-up.
    pub max: f64,
    /// Rate at and after `decay_steps` updates.
    pub min: f64,
    /// Updates over which the rate grows from `init` to `max`. 0: it starts at `max`.
    pub warmup_steps: u64,
    /// Updates, the warm-up's included, after which the rate is `min`. More than `warmup_steps`.
    pub decay_steps: u64,
}

impl LrSchedule {
    /// The rate after `updates` updates. Update n of a run (from 1) uses `lr(n)`, so that the first
    /// one already moves the weights; Megatron uses `lr(n - 1)`.
    pub fn lr(&self, updates: u64) -> f64 {
        let Self { init, max, min, warmup_steps, decay_steps } = *self;
        if warmup_steps > 0 && updates <= warmup_steps {
            return init + (max - init) * updates as f64 / warmup_steps as f64;
        }
        if updates >= decay_steps {
            return min;
        }
        let ratio = (updates - warmup_steps) as f64 / (decay_steps - warmup_steps) as f64;
        min + (max - min) * 0.5 * ((PI * ratio).cos() + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    // The values of Megatron's `tests/unit_tests/test_optimizer_param_scheduler.py`.
    const MEGATRON: LrSchedule =
        LrSchedule { init: 0.01, max: 0.1, min: 0.001, warmup_steps: 100, decay_steps: 1000 };

    #[rstest]
    #[case(0, 0.01)]
    #[case(50, 0.055)]
    #[case(100, 0.1)]
    #[case(500, 0.001 + 0.099 * 0.5 * ((PI * 400.0 / 900.0).cos() + 1.0))]
    #[case(1000, 0.001)]
    #[case(1001, 0.001)]
    #[case(u64::MAX, 0.001)]
    fn rates_are_megatrons(#[case] updates: u64, #[case] expected: f64) {
        let lr = MEGATRON.lr(updates);
        assert!((lr - expected).abs() < 1e-15, "{lr} is not {expected}");
    }

    #[test]
    fn without_warm_up_the_rate_starts_at_its_maximum() {
        let schedule = LrSchedule { warmup_steps: 0, ..MEGATRON };
        assert_eq!(schedule.lr(0), 0.1);
        assert!(schedule.lr(1) < 0.1);
    }

    #[test]
    fn the_rate_rises_through_the_warm_up_and_falls_from_then_on() {
        for updates in 0..1000 {
            let (now, next) = (MEGATRON.lr(updates), MEGATRON.lr(updates + 1));
            assert_eq!(now < next, updates < 100, "after {updates} updates: {now}, then {next}");
        }
    }
}

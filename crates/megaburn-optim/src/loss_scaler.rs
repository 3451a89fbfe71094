use serde::{Deserialize, Serialize};

use crate::error::OptimError;

/// The factor on the loss of an f16 run, which keeps small gradients representable. It is halved
/// when gradients overflow and doubled after a window of steps without overflow.
///
/// ```
/// use megaburn_optim::{LossScaleConfig, LossScaler};
///
/// let mut scaler = LossScaler::new(LossScaleConfig { initial: 8.0, hysteresis: 1, ..Default::default() })?;
/// scaler.update(true);
/// assert_eq!(scaler.scale(), 4.0);
/// # Ok::<(), megaburn_optim::OptimError>(())
/// ```
///
/// Source: Megatron-LM `megatron/core/optimizer/grad_scaler.py`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaler {
    #[serde(skip)]
    config: LossScaleConfig,
    scale: f64,
    /// Updates since the last overflow or growth.
    clean: u64,
    /// Overflows still tolerated before the scale is reduced.
    tolerated: u64,
}

/// [`LossScaler`] configuration; the defaults are Megatron's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaleConfig {
    /// Scale of the first step (`--initial-loss-scale`).
    pub initial: f64,
    /// Lower bound of the scale (`--min-loss-scale`).
    pub min: f64,
    /// Updates without an overflow after which the scale is doubled (`--loss-scale-window`). `None`
    /// keeps the scale constant (`--loss-scale`).
    pub window: Option<u64>,
    /// Number of overflows, not necessarily consecutive, after which the scale is halved; each
    /// further overflow halves it again. The count restarts only when the scale grows
    /// (`--hysteresis`).
    pub hysteresis: u64,
}

/// Upper bound: the scale is an f32 number on the device, and an infinite scale would never
/// recover.
const LARGEST: f64 = f64::from_bits((1023 + 126) << 52);

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self {
            initial: 2f64.powi(32),
            min: 1.0,
            window: Some(1000),
            hysteresis: 2,
        }
    }
}

impl LossScaler {
    /// A scaler before its first step.
    ///
    /// # Errors
    /// A scale is not positive and finite, the initial scale is below the minimum, or the window or
    /// hysteresis is 0.
    pub fn new(config: LossScaleConfig) -> Result<Self, OptimError> {
        let LossScaleConfig {
            initial,
            min,
            window,
            hysteresis,
        } = config;
        let check = |name, value: f64, ok: bool, must_be| {
            if ok {
                Ok(())
            } else {
                Err(OptimError::BadLossScale {
                    name,
                    value,
                    must_be,
                })
            }
        };
        check(
            "min",
            min,
            min > 0.0 && min.is_finite(),
            "positive and finite",
        )?;
        let ok = (min..=LARGEST).contains(&initial);
        check(
            "initial",
            initial,
            ok,
            "at least the smallest scale and at most 2^126",
        )?;
        check(
            "window",
            window.unwrap_or(1) as f64,
            window != Some(0),
            "at least 1",
        )?;
        check(
            "hysteresis",
            hysteresis as f64,
            hysteresis > 0,
            "at least 1",
        )?;
        Ok(Self {
            config,
            scale: initial,
            clean: 0,
            tolerated: hysteresis,
        })
    }

    /// The factor that the loss is multiplied by, and gradients are divided by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The number of consecutive overflows that take the scale from `initial` to `min`; 0 for a
    /// constant scale.
    pub fn max_backoffs(&self) -> u64 {
        let LossScaleConfig {
            initial,
            min,
            window,
            hysteresis,
        } = self.config;
        let halvings = (initial / min).log2().ceil() as u64;
        if window.is_some() {
            hysteresis.saturating_add(halvings)
        } else {
            0
        }
    }

    /// Records a step, and whether a gradient or the loss overflowed on any rank.
    pub fn update(&mut self, overflowed: bool) {
        let Some(window) = self.config.window else {
            return;
        };
        if overflowed {
            self.clean = 0;
            self.tolerated = self.tolerated.saturating_sub(1);
            if self.tolerated == 0 {
                self.scale = (self.scale * 0.5).max(self.config.min);
            }
            return;
        }
        self.clean += 1;
        if self.clean >= window {
            (self.clean, self.tolerated) = (0, self.config.hysteresis);
            self.scale = (self.scale * 2.0).min(LARGEST);
        }
    }

    /// Continues from the state of a checkpointed scaler. A constant scale stays as configured.
    pub fn resume(&mut self, from: &Self) {
        if self.config.window.is_some() {
            *self = Self {
                config: self.config,
                ..*from
            };
            self.scale = self.scale.max(self.config.min);
            self.tolerated = self.tolerated.min(self.config.hysteresis);
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn scaler(config: LossScaleConfig) -> LossScaler {
        LossScaler::new(config).unwrap()
    }

    /// The scale after each step of `steps`: `.` is a clean step, `!` an overflow.
    fn scales(scaler: &mut LossScaler, steps: &str) -> Vec<f64> {
        let after = |step| {
            scaler.update(step == '!');
            scaler.scale()
        };
        steps.chars().map(after).collect()
    }

    #[test]
    fn the_defaults_are_megatrons() {
        let mut scaler = scaler(LossScaleConfig::default());
        assert_eq!(scaler.scale(), 4294967296.0);
        let clean = scales(&mut scaler, &".".repeat(2000));
        assert!(clean[..999].iter().all(|&scale| scale == 2f64.powi(32)));
        assert!(clean[999..1999].iter().all(|&scale| scale == 2f64.powi(33)));
        assert_eq!(clean[1999], 2f64.powi(34));
        // The first overflow is tolerated.
        assert_eq!(
            scales(&mut scaler, "!!!"),
            [34, 33, 32].map(|e| 2f64.powi(e))
        );
    }

    /// Megatron's rule, which differs from PyTorch's: clean steps do not restore the hysteresis.
    #[rstest]
    #[case(2, 4, "!.!", &[16.0, 16.0, 8.0])]
    #[case(2, 4, "!.!.!", &[16.0, 16.0, 8.0, 8.0, 4.0])]
    #[case(2, 4, "!....!", &[16.0, 16.0, 16.0, 16.0, 32.0, 32.0])]
    #[case(2, 4, "!!....!!", &[16.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0, 8.0])]
    #[case(2, 4, "...!...!....", &[16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 8.0, 8.0, 8.0, 8.0, 16.0])]
    #[case(1, 2, "!!!!!!..", &[8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0])]
    #[case(3, 1, "!!.!!!", &[16.0, 16.0, 32.0, 32.0, 32.0, 16.0])]
    fn it_backs_off_by_halves_and_grows_behind_a_window(
        #[case] hysteresis: u64,
        #[case] window: u64,
        #[case] steps: &str,
        #[case] expected: &[f64],
    ) {
        let window = Some(window);
        let config = LossScaleConfig {
            initial: 16.0,
            min: 1.0,
            window,
            hysteresis,
        };
        assert_eq!(scales(&mut scaler(config), steps), expected);
    }

    #[test]
    fn a_constant_scale_stays() {
        let config = LossScaleConfig {
            initial: 128.0,
            window: None,
            ..Default::default()
        };
        let mut constant = scaler(config);
        assert_eq!(scales(&mut constant, "!!!...!"), [128.0; 7]);
        constant.resume(&scaler(LossScaleConfig::default()));
        assert_eq!(constant.scale(), 128.0);
    }

    #[test]
    fn it_grows_to_what_f32_holds() {
        let config = LossScaleConfig {
            window: Some(1),
            ..Default::default()
        };
        let mut largest = scaler(config);
        scales(&mut largest, &".".repeat(200));
        assert_eq!(largest.scale(), 2f64.powi(126));
    }

    #[test]
    fn it_goes_on_as_if_it_had_not_been_interrupted() {
        let config = LossScaleConfig {
            initial: 16.0,
            min: 1.0,
            window: Some(3),
            hysteresis: 2,
        };
        let steps = "!..!...!!.!...";
        let whole = scales(&mut scaler(config), steps);
        for at in 0..steps.len() {
            let mut first = scaler(config);
            let before = scales(&mut first, &steps[..at]);
            let mut second = scaler(config);
            second.resume(&first);
            assert_eq!([before, scales(&mut second, &steps[at..])].concat(), whole);
        }
    }

    #[test]
    fn it_may_go_on_with_a_smaller_window() {
        let config = LossScaleConfig {
            window: Some(8),
            ..Default::default()
        };
        let mut first = scaler(config);
        scales(&mut first, ".....");
        let mut second = scaler(LossScaleConfig {
            window: Some(3),
            ..config
        });
        second.resume(&first);
        assert_eq!(
            scales(&mut second, "...."),
            [33, 33, 33, 34].map(|e| 2f64.powi(e))
        );
    }

    #[test]
    fn so_many_overflows_take_it_to_the_smallest() {
        let config = LossScaleConfig {
            initial: 48.0,
            min: 1.0,
            window: Some(4),
            hysteresis: 3,
        };
        let mut falling = scaler(config);
        assert_eq!(falling.max_backoffs(), 9);
        let scales = scales(&mut falling, "!!!!!!!!!");
        assert_eq!(scales, [48.0, 48.0, 24.0, 12.0, 6.0, 3.0, 1.5, 1.0, 1.0]);
        assert_eq!(
            scaler(LossScaleConfig {
                window: None,
                ..config
            })
            .max_backoffs(),
            0
        );
    }

    #[rstest]
    #[case(LossScaleConfig { initial: 1e39, window: None, ..Default::default() }, "at most 2^126")]
    #[case(LossScaleConfig { min: 0.0, ..Default::default() }, "min is 0; it must be positive")]
    #[case(LossScaleConfig { initial: 0.5, ..Default::default() }, "initial is 0.5; it must be at")]
    #[case(LossScaleConfig { initial: f64::NAN, ..Default::default() }, "initial is NaN")]
    #[case(LossScaleConfig { window: Some(0), ..Default::default() }, "window is 0; it must be")]
    #[case(LossScaleConfig { hysteresis: 0, ..Default::default() }, "hysteresis is 0; it must be")]
    fn impossible_scales_are_refused(#[case] config: LossScaleConfig, #[case] message: &str) {
        let error = LossScaler::new(config).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

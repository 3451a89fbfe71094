use serde::{Deserialize, Serialize};

use crate::OptimError;

/// What an f16 run multiplies its loss with, so that small gradients do not vanish: halved where
/// gradients overflow, doubled after a while without.
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
    /// Overflows that are still tolerated before the scale is reduced.
    tolerated: u64,
}

/// [`LossScaler`] configuration; the defaults are Megatron's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaleConfig {
    /// Scale of the first step (`--initial-loss-scale`).
    pub initial: f64,
    /// It falls no lower (`--min-loss-scale`).
    pub min: f64,
    /// Updates without an overflow after which it is doubled (`--loss-scale-window`); none: it stays
    /// what it is (`--loss-scale`).
    pub window: Option<u64>,
    /// Overflows, not necessarily one after the other, at the last of which it is halved, and at each
    /// one behind that. They are counted anew only when it grows (`--hysteresis`).
    pub hysteresis: u64,
}

/// Scales are f32 numbers on the device; one of infinity would never come back.
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
    /// At its first step.
    ///
    /// # Errors
    /// A scale that is not positive and finite, an initial one below the smallest, a window or
    /// hysteresis of 0.
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

    /// What the loss is multiplied with, and gradients are divided by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// How many overflows in a row take it from the largest scale that it was given to the smallest.
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

    /// Takes note of a step, and whether a gradient or the loss overflowed in it on any rank.
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

    /// Goes on where another scaler, of a checkpoint, stands; a constant scale stays its own.
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

    /// Clean steps are dots, overflows are bangs; the scale behind each.
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

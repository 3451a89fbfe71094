//! The small floating-point formats of quantised products.

use serde::{Deserialize, Serialize};

/// A floating-point format of 8 or 4 bits, as quantisation uses it: without infinities.
///
/// Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1; OCP Microscaling
/// Formats 1.0 (2023), table 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SmallFloat {
    /// 4 bits of exponent and 3 of mantissa, up to 448.
    E4m3,
    /// 5 bits of exponent and 2 of mantissa, up to 57344.
    E5m2,
    /// 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign.
    E2m1,
}

impl SmallFloat {
    /// The largest number.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
            Self::E2m1 => 6.0,
        }
    }

    /// The bits of mantissa that are stored, and the exponent of the smallest normal number.
    const fn layout(self) -> (i32, i32) {
        match self {
            Self::E4m3 => (3, -6),
            Self::E5m2 => (2, -14),
            Self::E2m1 => (1, 0),
        }
    }

    /// The nearest number of the format, the even one of two. What is larger than the
    /// [largest](Self::largest) becomes the largest; NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        let step = self.step(x);
        let largest = self.largest();
        ((x / step).round_ties_even() * step).clamp(-largest, largest)
    }

    /// One of the two numbers of the format around `x`: for a `uniform` in `[0, 1)`, the one further
    /// from zero with a probability that is the share of the distance that `x` is on the way to it.
    /// The expected value is then `x`. What is larger than the [largest](Self::largest) becomes the
    /// largest; NaN stays NaN.
    pub fn round_stochastically(self, x: f32, uniform: f32) -> f32 {
        let step = self.step(x);
        let steps = x.abs() / step;
        let below = steps.floor();
        let up = if uniform < steps - below { 1.0 } else { 0.0 };
        let magnitude = ((below + up) * step).clamp(0.0, self.largest());
        magnitude.copysign(x)
    }

    /// The distance between two numbers of the format near `x`, a power of two.
    fn step(self, x: f32) -> f32 {
        let (mantissa, smallest) = self.layout();
        let exponent = ((x.to_bits() >> 23) & 0xff) as i32 - 127;
        power_of_two(exponent.max(smallest) - mantissa)
    }
}

/// `2^exponent`, for exponents of normal numbers.
pub(super) fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent.clamp(-126, 127) + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use float8::{F8E4M3, F8E5M2};
    use rstest::rstest;

    use super::*;

    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    /// All finite numbers of a format that are not negative, in ascending order.
    fn numbers(format: SmallFloat) -> Vec<f32> {
        let of = |code: u8| match format {
            SmallFloat::E4m3 => F8E4M3::from_bits(code).to_f32(),
            SmallFloat::E5m2 => F8E5M2::from_bits(code).to_f32(),
            SmallFloat::E2m1 => E2M1[usize::from(code)],
        };
        let codes = if format == SmallFloat::E2m1 { 8 } else { 128 };
        (0..codes)
            .map(of)
            .filter(|number| number.is_finite())
            .collect()
    }

    #[rstest]
    fn every_number_is_rounded_to_the_nearest(
        #[values(SmallFloat::E4m3, SmallFloat::E5m2, SmallFloat::E2m1)] format: SmallFloat,
    ) {
        let all = numbers(format);
        assert_eq!(all.last(), Some(&format.largest()));
        for (code, pair) in all.windows(2).enumerate() {
            let [low, high] = [pair[0], pair[1]];
            let middle = low.midpoint(high);
            let even = if code % 2 == 0 { low } else { high };
            for (x, expected) in [
                (low, low),
                (low.midpoint(middle), low),
                (middle.next_down(), low),
                (middle, even),
                (middle.next_up(), high),
                (high, high),
            ] {
                assert_eq!(format.round(x), expected, "{format:?} {x}");
                assert_eq!(format.round(-x), -expected, "{format:?} {x}");
            }
        }
        for beyond in [format.largest() * 1.01, 1e38, f32::INFINITY] {
            assert_eq!(format.round(beyond), format.largest());
            assert_eq!(format.round(-beyond), -format.largest());
        }
        assert!(format.round(f32::NAN).is_nan());
        assert!(format.round(-0.0).is_sign_negative());
        assert_eq!(format.round(f32::MIN_POSITIVE / 4.0), 0.0);
    }

    #[rstest]
    fn stochastic_rounding_is_exact_given_the_number_drawn(
        #[values(SmallFloat::E4m3, SmallFloat::E2m1)] format: SmallFloat,
    ) {
        for pair in numbers(format).windows(2) {
            let [low, high] = [pair[0], pair[1]];
            for share in [0.0, 0.25, 0.5, 0.875] {
                let x = low + share * (high - low);
                for sign in [1.0, -1.0] {
                    let round = |uniform| format.round_stochastically(sign * x, uniform);
                    assert_eq!(round(share), sign * low, "{x} is at {share}");
                    assert_eq!(round(0.999), sign * low);
                    let up = if share > 0.0 { high } else { low };
                    assert_eq!(round((share - 1e-6).max(0.0)), sign * up);
                }
            }
        }
        let largest = format.largest();
        assert_eq!(format.round_stochastically(-1.01 * largest, 0.0), -largest);
        assert_eq!(format.round_stochastically(f32::INFINITY, 0.9), largest);
        assert!(format.round_stochastically(f32::NAN, 0.0).is_nan());
    }

    #[test]
    fn stochastic_rounding_has_no_bias() {
        const DRAWS: u32 = 4096;
        for x in [0.1f32, -0.7, 1.3, 2.75, -5.1] {
            let all = (0..DRAWS).map(|i| i as f32 / DRAWS as f32);
            let rounded = all.map(|u| f64::from(SmallFloat::E2m1.round_stochastically(x, u)));
            let mean = rounded.sum::<f64>() / f64::from(DRAWS);
            assert!((mean - f64::from(x)).abs() < 1e-3, "{x}: {mean}");
        }
        // Rounding to the nearest is biased.
        assert_eq!(SmallFloat::E2m1.round(2.75), 3.0);
    }
}

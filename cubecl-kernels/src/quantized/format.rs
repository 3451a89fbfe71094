//! The small floating-point formats of quantised products.

use serde::{Deserialize, Serialize};

/// A floating-point format of 8 bits, as quantisation uses it: without infinities.
///
/// Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SmallFloat {
    /// 4 bits of exponent and 3 of mantissa, up to 448.
    E4m3,
    /// 5 bits of exponent and 2 of mantissa, up to 57344.
    E5m2,
}

impl SmallFloat {
    /// The largest number.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// The bits of mantissa that are stored, and the exponent of the smallest normal number.
    const fn layout(self) -> (i32, i32) {
        match self {
            Self::E4m3 => (3, -6),
            Self::E5m2 => (2, -14),
        }
    }

    /// The nearest number of the format, the even one of two. What is larger than the
    /// [largest](Self::largest) becomes the largest; NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        let (mantissa, smallest) = self.layout();
        let exponent = ((x.to_bits() >> 23) & 0xff) as i32 - 127;
        // The distance between two numbers of the format near x, a power of two.
        let step = power_of_two(exponent.max(smallest) - mantissa);
        let largest = self.largest();
        ((x / step).round_ties_even() * step).clamp(-largest, largest)
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

    /// All finite numbers of a format that are not negative, in ascending order.
    fn numbers(format: SmallFloat) -> Vec<f32> {
        let of = |code: u8| match format {
            SmallFloat::E4m3 => F8E4M3::from_bits(code).to_f32(),
            SmallFloat::E5m2 => F8E5M2::from_bits(code).to_f32(),
        };
        (0..128)
            .map(of)
            .filter(|number| number.is_finite())
            .collect()
    }

    #[rstest]
    fn every_number_is_rounded_to_the_nearest(
        #[values(SmallFloat::E4m3, SmallFloat::E5m2)] format: SmallFloat,
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
}

//! Floats of eight bits: what each code stands for, and the code nearest to a number.
//!
//! Sources: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022) for E4M3 and E5M2; OCP
//! Microscaling Formats 1.0 (2023) for E8M0.

use std::sync::LazyLock;

use burn::tensor::f16;
use megaburn_torch as torch;
use safetensors::Dtype;

/// The formats of FP8 weights and their scales.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::hf) enum Float8 {
    /// Four bits of exponent and three of mantissa, without infinities; the largest number is 448.
    E4m3,
    /// Five bits of exponent and two of mantissa: the upper half of an f16.
    E5m2,
    /// Eight bits of exponent: powers of two from 2^-127 to 2^127, which are scales.
    E8m0,
}

/// The largest number in E4M3.
pub(super) const LARGEST: f32 = 448.0;
/// The code of [`LARGEST`].
const LARGEST_CODE: u8 = 0x7e;
/// The smallest positive number in E4M3 with full precision.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
/// Numbers below [`SMALLEST_NORMAL`] are multiples of one over this.
const SUBNORMALS: f32 = 512.0;

impl Float8 {
    /// The format of a safetensors type, if it is one.
    pub(in crate::hf) fn of_safetensors(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F8_E4M3 => Some(Self::E4m3),
            Dtype::F8_E5M2 => Some(Self::E5m2),
            Dtype::F8_E8M0 => Some(Self::E8m0),
            _ => None,
        }
    }

    /// The format of a type of PyTorch, if it is one.
    pub(in crate::hf) fn of_torch(dtype: torch::DType) -> Option<Self> {
        match dtype {
            torch::DType::F8E4M3 => Some(Self::E4m3),
            torch::DType::F8E5M2 => Some(Self::E5m2),
            torch::DType::F8E8M0 => Some(Self::E8m0),
            _ => None,
        }
    }

    /// The name of the safetensors type.
    pub(in crate::hf) fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "F8_E4M3",
            Self::E5m2 => "F8_E5M2",
            Self::E8m0 => "F8_E8M0",
        }
    }

    /// The numbers that the codes 0 to 255 stand for.
    pub(super) fn numbers(self) -> &'static [f32; 256] {
        type Numbers = LazyLock<[f32; 256]>;
        static E4M3: Numbers = LazyLock::new(|| Float8::E4m3.computed());
        static E5M2: Numbers = LazyLock::new(|| Float8::E5m2.computed());
        static E8M0: Numbers = LazyLock::new(|| Float8::E8m0.computed());
        match self {
            Self::E4m3 => &E4M3,
            Self::E5m2 => &E5M2,
            Self::E8m0 => &E8M0,
        }
    }

    fn computed(self) -> [f32; 256] {
        std::array::from_fn(|code| self.number(code as u8))
    }

    fn number(self, code: u8) -> f32 {
        match self {
            Self::E4m3 => {
                let sign = if code >= 0x80 { -1.0 } else { 1.0 };
                let exponent = i32::from(code >> 3 & 0xf);
                let mantissa = f32::from(code & 7);
                sign * match (exponent, code & 7) {
                    (0xf, 7) => f32::NAN,
                    (0, _) => mantissa / SUBNORMALS,
                    _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
                }
            }
            Self::E5m2 => f16::from_bits(u16::from(code) << 8).to_f32(),
            Self::E8m0 => match code {
                0xff => f32::NAN,
                // The smallest power is no normal number in f32.
                0 => 2f32.powi(-126) / 2.0,
                _ => 2f32.powi(i32::from(code) - 127),
            },
        }
    }
}

/// Returns the E4M3 code of `x`: rounds to the nearest number, ties to even, and saturates at the
/// largest number.
pub(super) fn e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = x.abs();
    let code = if size >= LARGEST {
        LARGEST_CODE
    } else if size < SMALLEST_NORMAL {
        (size * SUBNORMALS).round_ties_even() as u8
    } else {
        // Of the 23 bits of the mantissa, 3 are kept. A mantissa that is rounded up to the next
        // power of two increases the exponent, which follows it.
        let bits = size.to_bits();
        let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    sign | code
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The codes of all finite numbers of one sign.
    fn finite(sign: u8) -> impl Iterator<Item = u8> {
        (0..=LARGEST_CODE).map(move |code| sign | code)
    }

    #[test]
    fn every_number_is_its_own_nearest() {
        for code in finite(0).chain(finite(0x80)) {
            assert_eq!(e4m3(Float8::E4m3.number(code)), code, "{code:#x}");
        }
    }

    #[test]
    fn formats_have_the_numbers_of_their_papers() {
        let all = [Float8::E4m3, Float8::E5m2, Float8::E8m0].map(Float8::numbers);
        for (format, code, number) in [
            (0, 0x01, 2f32.powi(-9)),
            (0, 0x08, 2f32.powi(-6)),
            (0, 0x38, 1.0),
            (0, 0xb9, -1.125),
            (0, 0x7e, 448.0),
            (1, 0x01, 2f32.powi(-16)),
            (1, 0x3d, 1.25),
            (1, 0xfb, -57344.0),
            (1, 0x7c, f32::INFINITY),
            (2, 0, 2f32.powi(-126) / 2.0),
            (2, 127, 1.0),
            (2, 254, 2f32.powi(127)),
        ] {
            assert_eq!(all[format][code], number, "format {format}, code {code:#x}");
        }
        for (format, code) in [(0, 0x7f), (0, 0xff), (1, 0x7d), (2, 0xff)] {
            assert!(
                all[format][code].is_nan(),
                "format {format}, code {code:#x}"
            );
        }
    }

    proptest! {
        /// No other number is nearer, and of two that are equally near the even one is taken.
        #[test]
        fn the_nearest_number_is_taken(bits in any::<u32>(), code in 0u8..LARGEST_CODE, to_middle in any::<bool>()) {
            let numbers = Float8::E4m3.numbers();
            let middle = (numbers[usize::from(code)] + numbers[usize::from(code) + 1]) / 2.0;
            let x = if to_middle { middle } else { f32::from_bits(bits % 0x7f80_0000) };
            let found = e4m3(x);
            let distance = |code: u8| (f64::from(numbers[usize::from(code)]) - f64::from(x)).abs();
            for other in finite(0).filter(|other| *other != found) {
                prop_assert!(
                    distance(found) < distance(other)
                        || (distance(found) == distance(other) && found.is_multiple_of(2)),
                    "{x}: {found:#x} is taken and {other:#x} is nearer"
                );
            }
            prop_assert_eq!(e4m3(-x), found | 0x80);
        }
    }
}

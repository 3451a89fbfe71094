//! The scale of elements that are quantised together.

use super::format::{SmallFloat, power_of_two};
use super::recipe::{QuantizationRecipe, Scaling};

/// The factor by which elements are multiplied before they are rounded, and its inverse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The factor.
    pub factor: f32,
    /// `1 / factor`, by which products are multiplied. NaN if the largest magnitude is not finite,
    /// so that no product of the matrix is taken for a number.
    pub inverse: f32,
}

/// The largest factor. Its inverse is a normal number.
const LARGEST: f32 = f32::from_bits((126 + 127) << 23);
/// The largest scale of a whole matrix in NVFP4, `2^116`. The inverse of a block's scale is at least
/// `2^-9` of its inverse, and still a normal number.
const LARGEST_OF_MATRIX: f32 = f32::from_bits((116 + 127) << 23);

impl Scale {
    /// The scale of elements whose largest magnitude is `amax`, in IEEE f32 as on GPUs. In NVFP4 it
    /// is that of a matrix that is one block.
    pub fn new(recipe: &QuantizationRecipe, format: SmallFloat, amax: f32) -> Self {
        if !amax.is_finite() {
            let inverse = f32::NAN;
            return Self {
                factor: 1.0,
                inverse,
            };
        }
        let factor = match recipe.scaling {
            Scaling::Nvfp4(_) => return Self::nvfp4(amax, amax),
            _ if amax == 0.0 => 1.0,
            Scaling::Microscaling => microscale(format, amax),
            Scaling::Tensor | Scaling::Blocks => {
                let exact = (format.largest() / amax).min(LARGEST);
                if recipe.power_of_two_scales {
                    f32::from_bits(exact.to_bits() & 0x7f80_0000)
                } else {
                    exact
                }
            }
        };
        Self {
            factor,
            inverse: 1.0 / factor,
        }
    }

    /// The scale of a block in NVFP4, by the largest magnitudes of the matrix and of the block. The
    /// matrix has a scale in f32 that maps its largest magnitude to the product of the largest
    /// numbers of E2M1 and E4M3. The inverse of the block's own scale is in E4M3; where it is 0, the
    /// elements become 0.
    pub fn nvfp4(of_matrix: f32, of_block: f32) -> Self {
        if !of_matrix.is_finite() {
            let inverse = f32::NAN;
            return Self {
                factor: 1.0,
                inverse,
            };
        }
        let [element, block] = [SmallFloat::E2m1.largest(), SmallFloat::E4m3.largest()];
        let matrix = match of_matrix == 0.0 {
            true => 1.0,
            false => (element * block / of_matrix).min(LARGEST_OF_MATRIX),
        };
        let stored = SmallFloat::E4m3.round(of_block / element * matrix);
        let inverse = stored * (1.0 / matrix);
        let factor = if stored == 0.0 { 0.0 } else { 1.0 / inverse };
        Self { factor, inverse }
    }

    /// The number that an element stands for after it was quantised.
    pub fn quantized(&self, format: SmallFloat, x: f32) -> f32 {
        format.round(x * self.factor) * self.inverse
    }

    /// As [`quantized`](Self::quantized), rounded
    /// [stochastically](SmallFloat::round_stochastically) by a number in `[0, 1)`.
    pub fn quantized_stochastically(&self, format: SmallFloat, x: f32, uniform: f32) -> f32 {
        format.round_stochastically(x * self.factor, uniform) * self.inverse
    }
}

/// The largest power of two with which `amax` does not exceed the format.
fn microscale(format: SmallFloat, amax: f32) -> f32 {
    let ratio = amax / format.largest();
    let exponent = ((ratio.to_bits() >> 23) & 0xff) as i32 - 127;
    let is_power = ratio.to_bits() & 0x007f_ffff == 0;
    power_of_two((i32::from(is_power) - 1 - exponent).min(126))
}

/// The largest magnitude of elements, 0 without any; NaN if one is NaN.
pub(super) fn largest_magnitude(elements: impl IntoIterator<Item = f32>) -> f32 {
    // The bits of numbers without sign have the order of the numbers, and those of NaN follow.
    let bits = elements.into_iter().map(|x| x.abs().to_bits());
    f32::from_bits(bits.max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::recipe::Nvfp4;

    fn recipe(scaling: Scaling, power_of_two_scales: bool) -> QuantizationRecipe {
        QuantizationRecipe {
            scaling,
            forward: SmallFloat::E4m3,
            gradients: SmallFloat::E5m2,
            power_of_two_scales,
        }
    }

    #[test]
    fn the_largest_element_becomes_the_largest_of_the_format() {
        for amax in [1e-20, 0.3, 7.0, 448.0, 1e30] {
            let scale = Scale::new(&recipe(Scaling::Tensor, false), SmallFloat::E4m3, amax);
            assert_eq!(SmallFloat::E4m3.round(amax * scale.factor), 448.0);
            for scaling in [Scaling::Tensor, Scaling::Microscaling] {
                let scale = Scale::new(&recipe(scaling, true), SmallFloat::E4m3, amax);
                let scaled = amax * scale.factor;
                assert!(scaled <= 448.0 && scaled * 2.0 > 448.0, "{scaled}");
                assert_eq!(scale.factor.to_bits() & 0x007f_ffff, 0);
                assert_eq!(scale.factor * scale.inverse, 1.0);
            }
        }
    }

    /// The block's scale is a number of E4M3 times that of the matrix, so the largest element of a
    /// block becomes 6 up to the rounding of the scale.
    #[test]
    fn scales_of_nvfp4_have_two_levels() {
        let matrix = 3.7f32;
        let scale = Scale::nvfp4(matrix, matrix);
        let step = matrix / (6.0 * 448.0);
        assert!((scale.inverse / (448.0 * step) - 1.0).abs() < 1e-6);
        assert!((scale.quantized(SmallFloat::E2m1, -matrix) / matrix + 1.0).abs() < 1e-6);
        for block in [2.9f32, 0.31, 0.02] {
            let Scale { factor, inverse } = Scale::nvfp4(matrix, block);
            let stored = f64::from(inverse) / f64::from(step);
            let nearest = f64::from(SmallFloat::E4m3.round(stored as f32));
            assert!((stored / nearest - 1.0).abs() < 1e-6, "{stored}");
            assert!((block * factor / 6.0 - 1.0).abs() < 1.0 / 16.0);
        }
        // Half of the smallest number of E4M3 is rounded to zero, as are all elements.
        let lost = Scale::nvfp4(matrix, 6.0 * step / 1024.0);
        assert_eq!([lost.factor, lost.inverse], [0.0; 2]);
    }

    #[test]
    fn extremes_have_scales() {
        for scaling in [
            Scaling::Tensor,
            Scaling::Blocks,
            Scaling::Microscaling,
            Scaling::Nvfp4(Nvfp4::default()),
        ] {
            let of = |amax| Scale::new(&recipe(scaling, false), SmallFloat::E5m2, amax);
            assert_eq!(of(0.0).quantized(SmallFloat::E5m2, 0.0), 0.0);
            let tiny = of(f32::MIN_POSITIVE);
            // NVFP4 loses what is this small.
            let is_scale = tiny.inverse.is_normal() || tiny.inverse == 0.0;
            assert!(tiny.factor.is_finite() && is_scale, "{scaling:?}: {tiny:?}");
            for broken in [f32::NAN, f32::INFINITY] {
                assert!(of(broken).quantized(SmallFloat::E5m2, 1.0).is_nan());
            }
        }
    }

    #[test]
    fn nan_is_the_largest_magnitude() {
        assert_eq!(largest_magnitude([]), 0.0);
        assert_eq!(largest_magnitude([-3.0, 2.0, -0.0]), 3.0);
        assert!(largest_magnitude([-3.0, -f32::NAN, f32::INFINITY]).is_nan());
    }
}

//! Whether numbers are finite.

use burn::tensor::DType;

/// Whether all elements are finite, which integers always are. A float is not if all bits of its
/// exponent are set.
pub(super) fn are_finite(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F64 => none(bytes, |x| is_full(u64::from_le_bytes(x), 0x7FF0 << 48)),
        DType::F32 => none(bytes, |x| is_full(u32::from_le_bytes(x), 0x7F80 << 16)),
        DType::BF16 => none(bytes, |x| is_full(u16::from_le_bytes(x), 0x7F80)),
        DType::F16 => none(bytes, |x| is_full(u16::from_le_bytes(x), 0x7C00)),
        _ => true,
    }
}

fn is_full<T: Copy + PartialEq + std::ops::BitAnd<Output = T>>(bits: T, exponent: T) -> bool {
    bits & exponent == exponent
}

/// Looks at all elements, so that the processor can compare many at once.
fn none<const N: usize>(bytes: &[u8], is_bad: impl Fn([u8; N]) -> bool) -> bool {
    let elements = bytes.as_chunks().0.iter();
    !elements.fold(false, |any, element| any | is_bad(*element))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As the types themselves say, for any bits, and for one element that is not finite.
        #[test]
        fn floats_are_finite_as_their_types_say(
            mut bits in prop::collection::vec(any::<u64>(), 1..70),
            (at, kind, fraction) in (any::<prop::sample::Index>(), 0u8..3, any::<u64>()),
        ) {
            let at = at.index(bits.len());
            for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
                let size = dtype.size();
                let exponent: u64 = match dtype {
                    DType::F64 => 0x7FF0 << 48,
                    DType::F32 => 0x7F80 << 16,
                    DType::BF16 => 0x7F80,
                    _ => 0x7C00,
                };
                bits[at] = match kind {
                    0 => fraction,
                    1 => exponent | (fraction & 1) << (size * 8 - 1),
                    _ => exponent | fraction,
                };
                let bytes: Vec<u8> =
                    bits.iter().flat_map(|x| x.to_le_bytes()[..size].to_vec()).collect();
                let expected = bits.iter().all(|bits| match dtype {
                    DType::F64 => f64::from_bits(*bits).is_finite(),
                    DType::F32 => f32::from_bits(*bits as u32).is_finite(),
                    DType::BF16 => bf16::from_bits(*bits as u16).is_finite(),
                    _ => f16::from_bits(*bits as u16).is_finite(),
                });
                prop_assert_eq!(are_finite(dtype, &bytes), expected, "{:?} {:x?}", dtype, bits);
            }
            prop_assert!(are_finite(DType::I64, &[0xFF; 8]));
        }
    }
}

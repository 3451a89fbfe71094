//! Copies elements and converts between floating-point types. Works on bytes, because tensors in a
//! file need not be aligned.

use burn::tensor::{DType, bf16, f16};
use half::slice::HalfFloatSliceExt;

/// Copies all elements of the source to the destination, which has the same number of elements.
pub(crate) type Copy = fn(&[u8], &mut [u8]);

/// Returns a function that copies elements of type `from` as type `to`, rounding once to nearest
/// (ties to even). `None` if the types differ and are not both floats.
pub(crate) fn copy(from: DType, to: DType) -> Option<Copy> {
    use DType::{BF16, F16, F32, F64};
    Some(match (from, to) {
        _ if from == to => |from, to| to.copy_from_slice(from),
        (F64, F32) => |from, to| each(from, to, f64::from_le_bytes, |x| (x as f32).to_le_bytes()),
        (F64, F16) => |from, to| {
            each(from, to, f64::from_le_bytes, |x| {
                f16::from_f32(to_odd(x)).to_le_bytes()
            })
        },
        (F64, BF16) => |from, to| {
            each(from, to, f64::from_le_bytes, |x| {
                bf16::from_f32(to_odd(x)).to_le_bytes()
            })
        },
        (F32, F64) => |from, to| each(from, to, f32::from_le_bytes, |x| f64::from(x).to_le_bytes()),
        (F32, BF16) => |from, to| {
            each(from, to, f32::from_le_bytes, |x| {
                bf16::from_f32(x).to_le_bytes()
            })
        },
        (BF16, F32) => |from, to| each(from, to, bf16::from_le_bytes, |x| x.to_f32().to_le_bytes()),
        (BF16, F64) => |from, to| each(from, to, bf16::from_le_bytes, |x| x.to_f64().to_le_bytes()),
        (F16, F32) => |from, to| from_f16(from, to, |x| x.to_le_bytes()),
        (F16, F64) => |from, to| from_f16(from, to, |x| f64::from(x).to_le_bytes()),
        (F16, BF16) => |from, to| from_f16(from, to, |x| bf16::from_f32(x).to_le_bytes()),
        (F32, F16) => |from, to| to_f16(from, to, f32::from_le_bytes),
        (BF16, F16) => |from, to| to_f16(from, to, |x| bf16::from_le_bytes(x).to_f32()),
        _ => return None,
    })
}

fn each<const A: usize, const B: usize, T>(
    from: &[u8],
    to: &mut [u8],
    load: impl Fn([u8; A]) -> T,
    store: impl Fn(T) -> [u8; B],
) {
    for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
        *to = store(load(*from));
    }
}

/// Rounds `x` to odd: if `x` is not exact in f32, returns the neighbouring f32 with an odd
/// mantissa. Rounding that to a shorter float gives the correctly rounded `x`, whereas rounding to
/// nearest twice would not.
///
/// Source: Boldo and Melquiond, "When double rounding is odd", 2005.
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x {
        return near;
    }
    let away = f64::from(near).abs() > x.abs();
    f32::from_bits((near.to_bits() - u32::from(away)) | 1)
}

/// Elements per conversion batch, because the processor converts many f16 values with one
/// instruction.
const TOGETHER: usize = 64;

fn from_f16<const B: usize>(from: &[u8], to: &mut [u8], store: impl Fn(f32) -> [u8; B]) {
    let mut half = [f16::ZERO; TOGETHER];
    let mut single = [0.0; TOGETHER];
    let from = from.as_chunks().0.chunks(TOGETHER);
    for (from, to) in from.zip(to.as_chunks_mut().0.chunks_mut(TOGETHER)) {
        let half = &mut half[..from.len()];
        let single = &mut single[..from.len()];
        half.iter_mut()
            .zip(from)
            .for_each(|(x, from)| *x = f16::from_le_bytes(*from));
        half.convert_to_f32_slice(single);
        to.iter_mut()
            .zip(single)
            .for_each(|(to, x)| *to = store(*x));
    }
}

fn to_f16<const A: usize>(from: &[u8], to: &mut [u8], load: impl Fn([u8; A]) -> f32) {
    let mut half = [f16::ZERO; TOGETHER];
    let mut single = [0.0; TOGETHER];
    let from = from.as_chunks().0.chunks(TOGETHER);
    for (from, to) in from.zip(to.as_chunks_mut().0.chunks_mut(TOGETHER)) {
        let half = &mut half[..from.len()];
        let single = &mut single[..from.len()];
        single
            .iter_mut()
            .zip(from)
            .for_each(|(x, from)| *x = load(*from));
        half.convert_from_f32_slice(single);
        to.iter_mut()
            .zip(half)
            .for_each(|(to, x)| *to = x.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

    fn value(bytes: &[u8], dtype: DType) -> f64 {
        match dtype {
            DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
            DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
            DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
            DType::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
            other => panic!("{other:?}"),
        }
    }

    /// Whether `bits` of a 16-bit float are the nearest to `x`, or the even ones of two nearest.
    fn is_nearest(x: f64, bits: u16, dtype: DType) -> bool {
        let (infinity, beyond) = match dtype {
            DType::F16 => (f16::INFINITY.to_bits(), 2f64.powi(16)),
            _ => (bf16::INFINITY.to_bits(), 2f64.powi(128)),
        };
        let magnitude = bits & 0x7FFF;
        if x.is_nan() {
            return magnitude > infinity;
        }
        // For rounding, infinity counts as the next number after the largest.
        let at = |bits: u16| {
            if bits == infinity {
                beyond
            } else {
                value(&bits.to_le_bytes(), dtype)
            }
        };
        let x_abs = x.abs().min(beyond);
        let far = (x_abs - at(magnitude)).abs();
        let above = (magnitude < infinity).then(|| magnitude + 1);
        let neighbours = magnitude.checked_sub(1).into_iter().chain(above);
        let nearest = neighbours.map(|other| (x_abs - at(other)).abs());
        magnitude <= infinity
            && (bits != magnitude) == x.is_sign_negative()
            && nearest
                .into_iter()
                .all(|other| far < other || (far == other && bits.is_multiple_of(2)))
    }

    fn check(bits: &[u64]) -> Result<(), TestCaseError> {
        for from in FLOATS {
            let size = from.size();
            let source: Vec<u8> = bits
                .iter()
                .flat_map(|x| x.to_le_bytes()[8 - size..].to_vec())
                .collect();
            for to in FLOATS {
                let mut result = vec![0; bits.len() * to.size()];
                copy(from, to).unwrap()(&source, &mut result);
                for (a, b) in source.chunks(size).zip(result.chunks(to.size())) {
                    let a = value(a, from);
                    let good = match (to, <[u8; 2]>::try_from(b)) {
                        (to, Ok(b)) => is_nearest(a, u16::from_le_bytes(b), to),
                        (DType::F32, _) => value(b, to).total_cmp(&f64::from(a as f32)).is_eq(),
                        _ => value(b, to).total_cmp(&a).is_eq(),
                    };
                    prop_assert!(
                        good || (a.is_nan() && value(b, to).is_nan()),
                        "{from:?} {a} to {to:?} {b:?}"
                    );
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn any_bits_round_to_the_nearest(bits in prop::collection::vec(any::<u64>(), 0..200)) {
            check(&bits)?;
        }

        /// Values close to the midpoint of two shorter floats, on either side of it and on it.
        #[test]
        fn borders_round_to_the_nearest(
            borders in prop::collection::vec((-160i32..160, any::<u16>(), -2i64..3, any::<bool>()), 1..100),
        ) {
            let close = |(power, mantissa, off, negative): (i32, u16, i64, bool)| {
                let x = (1.0 + f64::from(mantissa) / 65536.0) * 2f64.powi(power);
                let bits = x.to_bits().wrapping_add_signed(off);
                bits | u64::from(negative) << 63
            };
            check(&borders.into_iter().map(close).collect::<Vec<_>>())?;
        }
    }

    #[rstest]
    #[case(DType::I64, DType::F32)]
    #[case(DType::F32, DType::I32)]
    #[case(DType::I32, DType::I64)]
    #[case(DType::U8, DType::I8)]
    fn other_types_do_not_become_each_other(#[case] from: DType, #[case] to: DType) {
        assert!(copy(from, to).is_none());
        assert!(copy(from, from).is_some());
    }
}

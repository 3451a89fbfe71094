//! Hashes by their definition, on the host.

use std::ops::Range;

use burn::tensor::{DType, TensorData};

use super::Runs;

/// Distinguish places: an element's index times these, for either half of a hash.
pub(super) const PLACE_0: u32 = 0x9E37_79B1;
pub(super) const PLACE_1: u32 = 0xC2B2_AE3D;
/// The same for the upper 32 bits of the index.
pub(super) const UPPER_PLACE_0: u32 = 0x85EB_CA77;
pub(super) const UPPER_PLACE_1: u32 = 0x27D4_EB2F;
/// The factors of [`mixed`].
pub(super) const MIX_0: u32 = 0x85EB_CA6B;
pub(super) const MIX_1: u32 = 0xC2B2_AE35;

/// The sum over elements of [`mixed`] bits, for each half.
pub(super) fn hash(data: &TensorData, offset: usize, runs: Runs, indices: Range<usize>) -> u64 {
    let wide;
    let data = match data.dtype() {
        DType::F16 => {
            wide = data.clone().convert_dtype(DType::F32);
            &wide
        }
        _ => data,
    };
    let size = data.dtype().size();
    let is_bf16 = data.dtype() == DType::BF16;
    let mut sums = [0u32; 2];
    let mut next = indices.start;
    while next < indices.end {
        let len = (runs.len - next % runs.len).min(indices.end - next);
        let at = runs.position(next) - offset;
        let run = &data.as_bytes()[at * size..(at + len) * size];
        for (index, element) in (next..).zip(run.chunks_exact(size)) {
            let [low, high] = bits_of(element, is_bf16);
            let [lower, upper] = [index as u32, (index as u64 >> 32) as u32];
            let factors = [(PLACE_0, UPPER_PLACE_0), (PLACE_1, UPPER_PLACE_1)];
            for (sum, (factor, upper_factor)) in sums.iter_mut().zip(factors) {
                let place = lower
                    .wrapping_mul(factor)
                    .wrapping_add(upper.wrapping_mul(upper_factor));
                // Numbers of up to 32 bits have no upper ones.
                let more = if high == 0 { 0 } else { mixed(high ^ !place) };
                *sum = sum.wrapping_add(mixed(low ^ place)).wrapping_add(more);
            }
        }
        next += len;
    }
    joined(sums)
}

pub(super) fn joined([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Spreads each bit over all others; different numbers have different results.
///
/// Source: the last step of MurmurHash3 (Austin Appleby, public domain).
fn mixed(mut bits: u32) -> u32 {
    bits ^= bits >> 16;
    bits = bits.wrapping_mul(MIX_0);
    bits ^= bits >> 13;
    bits = bits.wrapping_mul(MIX_1);
    bits ^ bits >> 16
}

/// Returns the lower and the upper 32 bits of an element. A bf16 number is widened to f32 first.
fn bits_of(element: &[u8], is_bf16: bool) -> [u32; 2] {
    match *element {
        [a, b] if is_bf16 => [u32::from_le_bytes([0, 0, a, b]), 0],
        [a, b, c, d] => [u32::from_le_bytes([a, b, c, d]), 0],
        _ => {
            let mut wide = [0; 8];
            wide[..element.len()].copy_from_slice(element);
            let wide = u64::from_le_bytes(wide);
            [wide as u32, (wide >> 32) as u32]
        }
    }
}

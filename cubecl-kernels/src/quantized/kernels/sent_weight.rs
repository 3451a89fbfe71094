//! Kernels for weights that are sent in E4M3. bf16 numbers are read and written as their bits.

use cubecl::prelude::*;

use super::convert::{inverse_of, pack, scale_of};
use super::numbers::number;

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// The codes of bf16 numbers, two in each word. A unit writes a word.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn packed_weight_kernel(
    x: &[u16],
    amax: &[f32],
    packed: &mut [u16],
    len: usize,
    #[comptime] power_of_two: bool,
) {
    let first = ABSOLUTE_POS * 2;
    if first < len {
        let scale = scale_of(amax[0usize], comptime!(LARGEST), power_of_two);
        let has_second = first + 1 < len;
        let second = select(has_second, first + 1, first);
        let a = of_bf16(u32::cast_from(x[first])) * scale;
        let b = of_bf16(u32::cast_from(x[second])) * scale;
        let kept = select(has_second, 0xffffu32, 0xffu32);
        packed[ABSOLUTE_POS] = u16::cast_from(pack(a, b, a, b, false) & kept);
    }
}

/// As [`packed_weight_kernel`], for multiples of four numbers: a unit writes four codes.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn packed_weight_by_four_kernel(
    x: &[u32],
    amax: &[f32],
    packed: &mut [u32],
    len: usize,
    #[comptime] power_of_two: bool,
) {
    if ABSOLUTE_POS * 4 < len {
        let scale = scale_of(amax[0usize], comptime!(LARGEST), power_of_two);
        let low = x[ABSOLUTE_POS * 2];
        let high = x[ABSOLUTE_POS * 2 + 1];
        packed[ABSOLUTE_POS] = pack(
            of_bf16(low & 0xffffu32) * scale,
            of_bf16(low >> 16u32) * scale,
            of_bf16(high & 0xffffu32) * scale,
            of_bf16(high >> 16u32) * scale,
            false,
        );
    }
}

/// The bf16 numbers of codes, two in each word. A unit reads a word.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn unpacked_weight_kernel(
    packed: &[u16],
    amax: &[f32],
    x: &mut [u16],
    len: usize,
    #[comptime] power_of_two: bool,
) {
    let first = ABSOLUTE_POS * 2;
    if first < len {
        let scale = scale_of(amax[0usize], comptime!(LARGEST), power_of_two);
        let inverse = inverse_of(amax[0usize], scale);
        let word = u32::cast_from(packed[ABSOLUTE_POS]);
        x[first] = u16::cast_from(value_of(word & 0xffu32, inverse));
        if first + 1 < len {
            x[first + 1] = u16::cast_from(value_of(word >> 8u32, inverse));
        }
    }
}

/// As [`unpacked_weight_kernel`], for multiples of four numbers: a unit reads four codes.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn unpacked_weight_by_four_kernel(
    packed: &[u32],
    amax: &[f32],
    x: &mut [u32],
    len: usize,
    #[comptime] power_of_two: bool,
) {
    if ABSOLUTE_POS * 4 < len {
        let scale = scale_of(amax[0usize], comptime!(LARGEST), power_of_two);
        let inverse = inverse_of(amax[0usize], scale);
        let word = packed[ABSOLUTE_POS];
        let low = value_of(word & 0xffu32, inverse);
        let low = low | (value_of((word >> 8u32) & 0xffu32, inverse) << 16u32);
        let high = value_of((word >> 16u32) & 0xffu32, inverse);
        let high = high | (value_of(word >> 24u32, inverse) << 16u32);
        x[ABSOLUTE_POS * 2] = low;
        x[ABSOLUTE_POS * 2 + 1] = high;
    }
}

/// The number that the bits of a bf16 number stand for.
#[cube]
fn of_bf16(bits: u32) -> f32 {
    f32::reinterpret(bits << 16u32)
}

/// The bits of the bf16 number that a code stands for: the nearest, of two the even one.
#[cube]
fn value_of(code: u32, inverse: f32) -> u32 {
    let bits = u32::reinterpret(number(code, false) * inverse);
    let mut rounded = (bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    if bits & 0x7fff_ffffu32 > 0x7f80_0000u32 {
        rounded = u32::new(0x7fc0);
    }
    rounded
}

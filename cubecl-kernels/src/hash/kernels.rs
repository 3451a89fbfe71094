use cubecl::prelude::*;

use super::reference::{MIX_0, MIX_1, PLACE_0, PLACE_1, UPPER_PLACE_0, UPPER_PLACE_1};

/// The units of a cube: planes of 32.
pub(super) const PLANES: u32 = 8;
const UNITS: usize = 32 * PLANES as usize;

/// Sums the mixed bits of elements: unit `i` of `n` takes every `n`-th, from the `i`th on. Each cube
/// writes two sums. The element `index` of runs is at `start + index / len * stride + index % len -
/// offset`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn hash_kernel<F: Float>(
    x: &[F],
    sums: &mut [i32],
    first: usize,
    count: usize,
    start: usize,
    len: usize,
    stride: usize,
    offset: usize,
    #[comptime] is_one_run: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut sum_0 = u32::new(0);
    let mut sum_1 = u32::new(0);
    let mut at = ABSOLUTE_POS;
    let step = CUBE_COUNT * UNITS;
    while at < count {
        let index = first + at;
        let mut place = start + index;
        if comptime!(!is_one_run) {
            place = start + index / len * stride + index % len;
        }
        let bits = u32::reinterpret(f32::cast_from(x[place - offset]));
        let wide = index as u64;
        let lower = wide as u32;
        let upper = (wide >> 32u64) as u32;
        sum_0 += mixed(bits ^ (lower * PLACE_0 + upper * UPPER_PLACE_0));
        sum_1 += mixed(bits ^ (lower * PLACE_1 + upper * UPPER_PLACE_1));
        at += step;
    }
    put_sum(sum_0, sums, 2 * CUBE_POS);
    sync_cube();
    put_sum(sum_1, sums, 2 * CUBE_POS + 1);
}

/// As on the host, in `reference.rs`.
#[cube]
fn mixed(bits: u32) -> u32 {
    let first = (bits ^ (bits >> 16u32)) * MIX_0;
    let second = (first ^ (first >> 13u32)) * MIX_1;
    second ^ (second >> 16u32)
}

/// Adds the sums of a cube's units and writes the result to `sums[at]`.
#[cube]
fn put_sum(sum: u32, sums: &mut [i32], at: usize) {
    let mut shared = Shared::<[u32]>::new_slice(comptime!(PLANES as usize));
    let sum = plane_sum(sum);
    if UNIT_POS_X == 0 {
        shared[UNIT_POS_Y as usize] = sum;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = u32::new(0);
        #[unroll]
        for plane in 0..PLANES {
            total += shared[plane as usize];
        }
        sums[at] = i32::reinterpret(total);
    }
}

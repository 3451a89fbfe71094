use cubecl::prelude::*;

use super::Loads;
use crate::kernel_parts::{PLANE, raise};

/// Units of a cube.
pub(in crate::quantized) const UNITS: u32 = 256;
/// Vectors that a unit loads at once, to hide memory latency.
const AHEAD: usize = 4;
const PLANES: u32 = UNITS / PLANE;

/// Raises `out[0]` to the bits of the largest magnitude in `x`, whose rows have `width` vectors
/// and begin every `stride` vectors; if it is `ranged`, `out[i]` to that of the range of rows whose
/// first row and end are `ranges[2 * i]` and `ranges[2 * i + 1]`, by cubes with `i` along y.
/// Otherwise `ranges` may be any buffer.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn amax_kernel<E: Numeric, F: Float, N: Size>(
    x: &[Vector<E, N>],
    ranges: &[u32],
    out: &mut [Atomic<u32>],
    vectors: usize,
    width: usize,
    stride: usize,
    #[comptime] contiguous: bool,
    #[comptime] ranged: bool,
    #[comptime] loads: Loads,
    #[define(E, F)] _dtypes: [ElemType; 2],
) {
    let units = CUBE_COUNT_X as usize * comptime!(UNITS as usize);
    let mut low = u32::new(0);
    let mut high = u32::new(0);
    let mut first = (CUBE_POS_X * comptime!(UNITS) + UNIT_POS) as usize;
    let mut end = vectors;
    let mut range = 0usize;
    if comptime!(ranged) {
        range = CUBE_POS_Y as usize;
        first += ranges[2 * range] as usize * width;
        end = ranges[2 * range + 1] as usize * width;
    }
    while first < end {
        let mut loaded = Array::<Vector<E, N>>::new(AHEAD);
        #[unroll]
        for i in 0..AHEAD {
            let at = first + i * units;
            let mut value = Vector::<E, N>::new(E::from_int(0));
            if at < end {
                if comptime!(contiguous) {
                    value = x[at];
                } else {
                    value = x[at / width * stride + at % width];
                }
            }
            loaded[i] = value;
        }
        #[unroll]
        for i in 0..AHEAD {
            #[unroll]
            for lane in 0..N::value() {
                let element = loaded[i].extract(lane);
                if comptime!(loads.per_element == 2) {
                    // Of a pair, the upper one decides the order of words; the lower one is shifted
                    // up, which removes its sign and the upper one.
                    let word = u32::reinterpret(element);
                    high = max(high, word & 0x7fff_ffffu32);
                    low = max(low, word << 17u32);
                } else if comptime!(loads.bits == 16) {
                    low = max(low, u32::cast_from(u16::reinterpret(element)) << 17u32);
                } else {
                    high = max(high, u32::reinterpret(element) & 0x7fff_ffffu32);
                }
            }
        }
        first += comptime!(AHEAD) * units;
    }
    let mut largest = high;
    if comptime!(loads.bits == 16) {
        let bits = u16::cast_from(max(high >> 16u32, low >> 17u32));
        largest = u32::reinterpret(f32::cast_from(F::reinterpret(bits)));
    }
    raise(out, range, largest, PLANES);
}

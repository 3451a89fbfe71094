use cubecl::prelude::*;

use crate::kernel_parts::PLANE;

/// Units of a cube.
pub(in crate::fp8) const UNITS: u32 = 256;
/// Vectors that a unit loads at once, to hide memory latency.
const AHEAD: u32 = 4;
const PLANES: u32 = UNITS / PLANE;

/// Raises `out[0]` to the bits of the largest magnitude in `x`, whose rows have `width` vectors
/// and begin every `stride` vectors.
///
/// As unsigned integers, the bits of magnitudes are ordered as their values, infinity is above all
/// numbers, and NaN above infinity. The maximum does not depend on the order of the units.
#[cube(launch, address_type = "dynamic")]
pub(in crate::fp8) fn amax_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Atomic<u32>],
    vectors: usize,
    width: usize,
    stride: usize,
    #[comptime] contiguous: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[u32]>::new_slice(comptime!(PLANES as usize));
    let units = CUBE_COUNT_X as usize * comptime!(UNITS as usize);
    let mut largest = u32::new(0);
    let mut first = ABSOLUTE_POS;
    while first < vectors {
        let mut loaded = Array::<Vector<F, N>>::new(comptime!(AHEAD as usize));
        #[unroll]
        for i in 0..comptime!(AHEAD as usize) {
            let at = first + i * units;
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if at < vectors {
                if comptime!(contiguous) {
                    value = x[at];
                } else {
                    value = x[at / width * stride + at % width];
                }
            }
            loaded[i] = value;
        }
        #[unroll]
        for i in 0..comptime!(AHEAD as usize) {
            #[unroll]
            for lane in 0..N::value() {
                let value = f32::cast_from(loaded[i].extract(lane));
                largest = max(largest, u32::reinterpret(value) & 0x7fff_ffffu32);
            }
        }
        first += comptime!(AHEAD as usize) * units;
    }
    let largest = plane_max(largest);
    if UNIT_POS_X == 0 {
        shared[UNIT_POS_Y as usize] = largest;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut largest = shared[0usize];
        #[unroll]
        for plane in 1..comptime!(PLANES as usize) {
            largest = max(largest, shared[plane]);
        }
        out[0usize].fetch_max(largest);
    }
}

//! The largest magnitude of what a kernel reads or writes. As unsigned integers, the bits of magnitudes
//! are ordered as their values, infinity is above all numbers, and NaN above infinity. So the maximum
//! does not depend on the order of the units.

use cubecl::prelude::*;

use super::PLANE;

/// The bits of the largest magnitude of a vector, as it is stored.
#[cube]
pub(crate) fn magnitude<F: Float, N: Size>(stored: Vector<F, N>) -> u32 {
    let wide = Vector::<f32, N>::cast_from(stored);
    let mut most = u32::new(0);
    #[unroll]
    for lane in 0..N::value() {
        most = max(most, u32::reinterpret(wide.extract(lane)) & 0x7fff_ffffu32);
    }
    most
}

/// Raises `amax[at]` to the largest of the numbers that the units of a cube have. All of them call it,
/// and the cube has `planes` planes.
#[cube]
pub(crate) fn raise(amax: &mut [Atomic<u32>], at: usize, own: u32, #[comptime] planes: u32) {
    let mut shared = Shared::<[u32]>::new_slice(comptime!(planes as usize));
    let largest = plane_max(own);
    let own_plane = UNIT_POS / comptime!(PLANE);
    if UNIT_POS == own_plane * comptime!(PLANE) {
        shared[own_plane as usize] = largest;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut largest = shared[0usize];
        #[unroll]
        for plane in 1..planes {
            largest = max(largest, shared[plane as usize]);
        }
        amax[at].fetch_max(largest);
    }
}

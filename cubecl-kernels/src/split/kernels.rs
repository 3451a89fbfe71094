//! The kernel that puts the gradient of a part into that of the tensor. Each unit copies one vector.

use cubecl::prelude::*;

use crate::kernel_parts::{PLANE, magnitude, raise};

/// Units of a cube.
pub(super) const UNITS: u32 = 256;

/// Copies rows of `width` vectors to places `first` of rows of `stride` vectors, and raises `amax[0]` to
/// the bits of the largest magnitude in them.
#[cube(launch, address_type = "dynamic")]
pub(super) fn put_part_kernel<F: Float, N: Size>(
    part: &[Vector<F, N>],
    whole: &mut [Vector<F, N>],
    amax: &mut [Atomic<u32>],
    vectors: usize,
    width: usize,
    stride: usize,
    first: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut largest = u32::new(0);
    if ABSOLUTE_POS < vectors {
        let stored = part[ABSOLUTE_POS];
        whole[ABSOLUTE_POS / width * stride + first + ABSOLUTE_POS % width] = stored;
        largest = magnitude(stored);
    }
    raise(amax, 0usize, largest, comptime!(UNITS / PLANE));
}

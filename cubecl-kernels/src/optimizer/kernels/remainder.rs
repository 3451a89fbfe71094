//! Kernels for masters that are kept as the 16 bits that a bf16 parameter lacks of them. Parameters
//! and remainders are read and written as 16-bit integers.

use cubecl::prelude::*;

/// The masters of parameters with these remainders.
#[cube(launch)]
pub(in crate::optimizer) fn joined_master_kernel<N: Size>(
    param: &[Vector<u16, N>],
    remainder: &[Vector<u16, N>],
    master: &mut [Vector<f32, N>],
    vectors: usize,
) {
    if ABSOLUTE_POS < vectors {
        master[ABSOLUTE_POS] = joined(param[ABSOLUTE_POS], remainder[ABSOLUTE_POS]);
    }
}

/// What parameters lack of their masters.
#[cube(launch)]
pub(in crate::optimizer) fn master_remainder_kernel<N: Size>(
    master: &[Vector<f32, N>],
    param: &[Vector<u16, N>],
    remainder: &mut [Vector<u16, N>],
    vectors: usize,
) {
    if ABSOLUTE_POS < vectors {
        remainder[ABSOLUTE_POS] = rest(master[ABSOLUTE_POS], param[ABSOLUTE_POS]);
    }
}

/// Adds the remainder, as a signed number, to the bits of the parameter.
#[cube]
pub(super) fn joined<N: Size>(param: Vector<u16, N>, remainder: Vector<u16, N>) -> Vector<f32, N> {
    let mut master = Vector::<f32, N>::new(0.0);
    let size = N::value();
    #[unroll]
    for i in 0..size {
        let upper = u32::cast_from(param.extract(i)) << 16u32;
        // Moving by 0x8000 makes the signed number an unsigned one.
        let moved = u32::cast_from(remainder.extract(i)) ^ 0x8000u32;
        master.insert(i, f32::reinterpret(upper + moved - 0x8000u32));
    }
    master
}

/// The difference of the bits of master and parameter, which is limited to signed 16-bit numbers.
#[cube]
pub(super) fn rest<N: Size>(master: Vector<f32, N>, param: Vector<u16, N>) -> Vector<u16, N> {
    let mut remainder = Vector::<u16, N>::new(0u16);
    let size = N::value();
    #[unroll]
    for i in 0..size {
        let upper = u32::cast_from(param.extract(i)) << 16u32;
        let difference = i32::reinterpret(u32::reinterpret(master.extract(i)) - upper);
        let limited = clamp(difference, -0x8000i32, 0x7fffi32);
        remainder.insert(i, u16::cast_from(u32::reinterpret(limited) & 0xffffu32));
    }
    remainder
}

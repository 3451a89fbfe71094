//! Kernels for scaling, partial sums of squares and their total.

use cubecl::prelude::*;

use super::UNITS;
use super::many::{QUAD, Quad, quad_at};

#[cube(launch)]
pub(in crate::optimizer) fn scale_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    factor: &[f32],
    out: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let wide = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        out[ABSOLUTE_POS] = Vector::cast_from(wide * Vector::new(factor[0]));
    }
}

/// Partial sums of squares: cube `i` of `n` sums every `n`-th block of `UNITS` vectors, from the
/// `i`th on.
#[cube(launch)]
pub(in crate::optimizer) fn squares_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    sums: &mut [f32],
    vectors: u64,
    #[define(F)] _dtype: ElemType,
) {
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut at = ABSOLUTE_POS;
    let step = CUBE_COUNT * UNITS;
    while at < vectors as usize {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += value * value;
        at += step;
    }
    put_sum(Vector::vector_sum(sum), sums);
}

/// `table` has for each cube the address of its first quad, and the number of quads.
#[cube(launch_unchecked)]
pub(in crate::optimizer) fn squares_of_many_kernel(table: &[u64], sums: &mut [f32]) {
    let entry = CUBE_POS * 2;
    let from = table[entry];
    let quads = table[entry + 1] as usize;
    let mut sum = Quad::new(0.0);
    let mut at = UNIT_POS as usize;
    while at < quads {
        let value = quad_at(from + at as u64 * QUAD);
        sum += value * value;
        at += UNITS;
    }
    put_sum(Vector::vector_sum(sum), sums);
}

/// Adds the sums of a cube's units and writes the result at the cube's index.
#[cube]
fn put_sum(sum: f32, sums: &mut [f32]) {
    let mut shared = Shared::new_slice(8usize);
    let sum = plane_sum(sum);
    if UNIT_POS_X == 0 {
        shared[UNIT_POS_Y as usize] = sum;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f32::new(0.0);
        #[unroll]
        for i in 0..8 {
            total += shared[i];
        }
        sums[CUBE_POS] = total;
    }
}

/// Adds partial sums with one cube: each unit sums every 256th, and the first unit adds the units'
/// sums. Elements past the first `len` are padding of the allocation, or belong to another tensor.
#[cube(launch)]
pub(in crate::optimizer) fn total_kernel(sums: &[f32], out: &mut [f32], len: u64) {
    let mut shared = Shared::<[f64]>::new_slice(UNITS);
    let mut sum = f64::new(0.0);
    let mut at = UNIT_POS as usize;
    while at < len as usize {
        sum += f64::cast_from(sums[at]);
        at += UNITS;
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f64::new(0.0);
        for i in 0..UNITS {
            total += shared[i];
        }
        out[0] = f32::cast_from(total);
    }
}

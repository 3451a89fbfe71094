//! `delta = rowsum(dO * O)`, which the softmax backward subtracts from every probability's
//! gradient.

use cubecl::prelude::*;

/// `rowsum(dO * O)`; a unit multiplies a chunk of eight elements.
///
/// # Shapes
/// `out`, `dout`: `[rows, d_v / 8]` vectors of eight, where rows are `[s_q, b, hq]`;
/// `delta: [b, hq, s_q]`.
#[cube(launch_unchecked)]
pub(in crate::attention) fn flash_delta<F: Float>(
    out: &[Vector<F, Const<8>>],
    dout: &[Vector<F, Const<8>>],
    delta: &mut [f32],
    rows: u32,
    s_q: u32,
    #[comptime] chunks: usize,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(chunks.next_power_of_two() as u32);
    let row = (CUBE_POS_X * CUBE_DIM + UNIT_POS) / lanes;
    let chunk = UNIT_POS % lanes;
    let mut sum = f32::new(0.0);
    if row < rows && chunk < comptime!(chunks as u32) {
        let at = row as usize * chunks + chunk as usize;
        let product = Vector::<f32, Const<8>>::cast_from(out[at])
            * Vector::<f32, Const<8>>::cast_from(dout[at]);
        sum = Vector::vector_sum(product);
    }
    #[unroll]
    for i in 0..comptime!(chunks.next_power_of_two().ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
    }
    if row < rows && chunk == 0 {
        // A row is `(position * batch + sequence) * heads + head`.
        let per_position = rows / s_q;
        let position = row / per_position;
        let rest = row % per_position;
        delta[(rest * s_q + position) as usize] = sum;
    }
}

//! The kernels that merge parts, each in one pass over memory.

use cubecl::prelude::*;

use super::partial_attention::LOWEST;

/// Merges a part with the queries from `start` on; a unit has a chunk of eight elements.
///
/// # Shapes
/// `out: [s_q * per_position, d_v / 8]` vectors of eight, and `lse: [per_position, s_q]`, where
/// `per_position = rows / n` counts the heads of all sequences; `part` and `part_lse` are the same
/// for `n` positions
#[cube(launch)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per buffer and per size"
)]
pub(super) fn merge_lse_kernel<F: Float>(
    out: &mut [Vector<f32, Const<8>>],
    lse: &mut [f32],
    part: &[Vector<F, Const<8>>],
    part_lse: &[f32],
    rows: u32,
    n: u32,
    start: u32,
    s_q: u32,
    #[comptime] chunks: usize,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(chunks.next_power_of_two() as u32);
    let row = (CUBE_POS_X * CUBE_DIM + UNIT_POS) / lanes;
    let chunk = UNIT_POS % lanes;
    // A row is `(position * sequences + sequence) * heads + head`.
    let per_position = rows / n;
    let position = row / per_position;
    let rest = row % per_position;
    let at = (rest * s_q + start + position) as usize;
    let mut mine = f32::new(LOWEST as f32);
    let mut theirs = f32::new(LOWEST as f32);
    // Only the lane that writes the LSE reads it; the others get it by shuffle.
    if row < rows && chunk == 0 {
        mine = lse[at];
        theirs = part_lse[(rest * n + position) as usize];
    }
    let first = UNIT_POS % 32 - chunk;
    mine = plane_shuffle(mine, first);
    theirs = plane_shuffle(theirs, first);
    let highest = max(max(mine, theirs), f32::new(LOWEST as f32));
    let mine = (mine - highest).exp();
    let theirs = (theirs - highest).exp();
    let sum = mine + theirs;
    // If neither part sees a key, this avoids 0 / 0.
    let over = max(sum, f32::new(f32::MIN_POSITIVE));
    if row < rows && chunk < comptime!(chunks as u32) {
        let from = row as usize * chunks + chunk as usize;
        let to = from + (start * per_position) as usize * chunks;
        let theirs = Vector::<f32, Const<8>>::cast_from(part[from]) * Vector::new(theirs / over);
        out[to] = out[to] * Vector::new(mine / over) + theirs;
        if chunk == 0 {
            lse[at] = sum.ln() + highest;
        }
    }
}

/// Adds `vectors` vectors of `x` to those of `sum` from `first` on.
#[cube(launch)]
pub(super) fn add_rows_kernel<F: Float, G: Float, N: Size>(
    sum: &mut [Vector<F, N>],
    x: &[Vector<G, N>],
    first: usize,
    vectors: usize,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let to = first + ABSOLUTE_POS;
        sum[to] += Vector::cast_from(x[ABSOLUTE_POS]);
    }
}

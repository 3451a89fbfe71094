//! Sums over the pairs of a distance.

use cubecl::prelude::*;

/// Planes that share the rows of a column.
pub(in crate::attention) const DIAGONAL_ROWS: u32 = 8;

/// `line[h, j - i + s_q - 1] = sum of x[h, i, j]`. Cubes are `[columns / 32, hq]`; each unit has one
/// column and every eighth row, so that a plane reads adjacent numbers.
///
/// # Shapes
/// `x: [hq, s_q, s_k]`, `line: [hq, s_q + s_k - 1]`
#[cube(launch)]
pub(in crate::attention) fn sum_diagonals(x: &[f32], line: &mut [f32], s_q: u32, s_k: u32) {
    let mut parts =
        Shared::<[f32]>::new_aligned_slice(comptime!(32 * DIAGONAL_ROWS as usize), 16usize);
    let columns = s_q + s_k - 1;
    let column = CUBE_POS_X * 32 + UNIT_POS_X;
    let head = CUBE_POS_Y;
    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS_Y;
    while i < s_q {
        // The key is `column - (s_q - 1 - i)`.
        let before = s_q - 1 - i;
        if column >= before && column - before < s_k {
            sum += x[(head * s_q + i) as usize * s_k as usize + (column - before) as usize];
        }
        i += comptime!(DIAGONAL_ROWS);
    }
    parts[(UNIT_POS_Y * 32 + UNIT_POS_X) as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < columns {
        let mut total = f32::new(0.0);
        #[unroll]
        for row in 0..comptime!(DIAGONAL_ROWS) {
            total += parts[(comptime!(row * 32) + UNIT_POS_X) as usize];
        }
        line[(head * columns + column) as usize] = total;
    }
}

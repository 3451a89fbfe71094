//! Embedding kernels; each unit processes one vector of four elements of a row (one element where
//! the row length is no multiple of four).

use cubecl::prelude::*;

/// Gathers the rows of tokens. Tokens without a row get vectors filled with `missing`.
#[cube(launch)]
pub(super) fn take_kernel<F: Float, I: Numeric, N: Size>(
    table: &[Vector<F, N>],
    ids: &[I],
    out: &mut [Vector<F, N>],
    first: i32,
    num_rows: i32,
    width: u32,
    vectors: usize,
    missing: f32,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let width = width as usize;
        let row = i32::cast_from(ids[ABSOLUTE_POS / width]) - first;
        let mut value = Vector::<F, N>::new(F::cast_from(missing));
        if row >= 0 && row < num_rows {
            value = table[usize::cast_from(row) * width + ABSOLUTE_POS % width];
        }
        out[ABSOLUTE_POS] = value;
    }
}

/// Adds the gradients of tokens to their rows. The cubes of a token sum all tokens with its id, in
/// order, if the token is the first with that id.
#[cube(launch)]
pub(super) fn add_kernel<F: Float, I: Numeric, N: Size>(
    dy: &[Vector<F, N>],
    ids: &[I],
    sum: &mut [Vector<f32, N>],
    tokens: u32,
    first: i32,
    num_rows: i32,
    width: u32,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let mut is_same = Shared::new_slice(256usize);
    let mut any_is_same = Shared::new_slice(1usize);
    let id = i32::cast_from(ids[CUBE_POS_X as usize]);
    let row = id - first;
    let column = CUBE_POS_Y * 256 + UNIT_POS_X;
    // `is_first` is the same for all units of a cube, as the barriers in the loop require.
    let mut is_first = row >= 0 && row < num_rows;
    let mut total = Vector::<f32, N>::new(0.0);
    let mut start = 0u32;
    while start < tokens && is_first {
        if UNIT_POS_X == 0 {
            any_is_same[0] = 0u32;
        }
        sync_cube();
        let mine = start + UNIT_POS_X;
        let mut same = 0u32;
        // CubeCL evaluates both sides of `&&`, so clamp the index.
        let at = min(mine, tokens - 1);
        if mine < tokens && i32::cast_from(ids[at as usize]) == id {
            same = 1u32;
            any_is_same[0] = 1u32;
        }
        is_same[UNIT_POS_X as usize] = same;
        sync_cube();
        if any_is_same[0] == 1u32 {
            for offset in 0..256u32 {
                if is_same[offset as usize] == 1u32 {
                    let token = start + offset;
                    if token < CUBE_POS_X {
                        is_first = false;
                    }
                    if column < width && is_first {
                        let at = token as usize * width as usize + column as usize;
                        total += Vector::cast_from(dy[at]);
                    }
                }
            }
        }
        // No unit may clear the flag before all have read it.
        sync_cube();
        start += 256;
    }
    if is_first && column < width {
        let at = usize::cast_from(row) * width as usize + column as usize;
        sum[at] += total;
    }
}

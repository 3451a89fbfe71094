use cubecl::prelude::*;

use super::CastSizes;
use super::cast::{COLS, GROUPS, PASSES, ROWS, STEP, TILE, VECTOR, WORDS, place, store_columns};

/// Words of a unit's eight columns in a row.
const HALVES: u32 = COLS / 4;

/// Transposes a matrix of bytes, with a cube for each tile. The bytes behind the last row are 0.
///
/// As in the cast, a unit has rows of 8 columns, 4 at a time, and puts the columns, a word each, into
/// shared memory, from where columns of 128 rows are stored. A vector is two words, or one byte where
/// rows do not begin at multiples of eight bytes.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn transpose_kernel<W: Numeric, M: Size>(
    x: &[Vector<W, M>],
    transposed: &mut [Vector<u32, Const<4>>],
    sizes: CastSizes,
    #[define(W)] _dtype: ElemType,
) {
    let mut tile = Shared::<[u32]>::new_slice(comptime!((TILE * WORDS) as usize));
    let first_row = CUBE_POS_Y * comptime!(TILE);
    let first_col = CUBE_POS_X * comptime!(TILE);
    let group = UNIT_POS % comptime!(GROUPS);
    let first_word = UNIT_POS / comptime!(GROUPS);
    let row = first_row + first_word * comptime!(ROWS);
    let col = first_col + group * comptime!(COLS);
    let loaded = load::<W, M>(x, row, col, &sizes);
    #[unroll]
    for pass in 0..PASSES {
        let word = first_word + pass * comptime!(STEP);
        #[unroll]
        for i in 0..COLS {
            let mut column = u32::new(0);
            #[unroll]
            for j in 0..ROWS {
                let at = comptime!(((pass * ROWS + j) * HALVES + i / 4) as usize);
                let byte = (loaded[at] >> comptime!(i % 4 * 8)) & 0xffu32;
                column |= byte << comptime!(j * 8);
            }
            let turn = group * 2 + comptime!(i % VECTOR);
            let at = place(group * comptime!(COLS) + i, word, turn);
            tile[at] = column;
        }
    }
    sync_cube();
    store_columns(
        &tile,
        transposed,
        first_row,
        first_col,
        0usize,
        sizes.padded,
        sizes.cols,
    );
}

/// Loads a unit's rows of eight columns in all passes, two words each; 0 outside of the matrix.
#[cube]
fn load<W: Numeric, M: Size>(
    x: &[Vector<W, M>],
    row: u32,
    col: u32,
    sizes: &CastSizes,
) -> Array<u32> {
    let words = M::value();
    let mut loaded = Array::<u32>::new(comptime!((PASSES * ROWS * HALVES) as usize));
    #[unroll]
    for i in 0..comptime!(PASSES * ROWS) {
        let row = row + comptime!(i / ROWS * STEP * ROWS + i % ROWS);
        let from = row as usize * sizes.stride as usize;
        let to = comptime!((i * HALVES) as usize);
        let mut low = u32::new(0);
        let mut high = u32::new(0);
        if comptime!(words == 2) {
            if row < sizes.rows && col < sizes.cols {
                let both = x[from + (col / comptime!(COLS)) as usize];
                low = u32::cast_from(both.extract(0usize));
                high = u32::cast_from(both.extract(1usize));
            }
        } else {
            #[unroll]
            for j in 0..COLS {
                if row < sizes.rows && col + j < sizes.cols {
                    let byte = u32::cast_from(x[from + (col + j) as usize].extract(0usize));
                    let placed = byte << comptime!(j % 4 * 8);
                    if comptime!(j < 4) {
                        low |= placed;
                    } else {
                        high |= placed;
                    }
                }
            }
        }
        loaded[to] = low;
        loaded[comptime!(to + 1)] = high;
    }
    loaded
}

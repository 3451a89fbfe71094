use cubecl::prelude::*;

use super::convert::{inverse_of, pack, scale_of};
use super::{CastSizes, CastVariant};

/// Rows and columns of the tile that a cube casts.
pub(in crate::fp8) const TILE: u32 = 128;
/// Units of a cube.
pub(in crate::fp8) const UNITS: u32 = 256;
/// Adjacent columns that a unit casts.
const COLS: u32 = 8;
/// Adjacent rows that a unit casts at a time: a word of the transpose.
const ROWS: u32 = 4;
/// Units that share rows of a tile.
const GROUPS: u32 = TILE / COLS;
/// How often a unit casts rows of the tile.
const PASSES: u32 = TILE / ROWS * GROUPS / UNITS;
/// Words of a column of the tile.
const WORDS: u32 = TILE / ROWS;
/// Words that a unit stores at once to the transpose, and such vectors of a column of the tile.
const VECTOR: u32 = 4;
const VECTORS: u32 = WORDS / VECTOR;

/// Casts a matrix, with a cube for each tile, and writes the inverse of its scale. A result that
/// the variant does not have may be any buffer.
///
/// A unit converts 4 rows of 8 columns. It stores the rows, and puts the columns, a word each, into
/// shared memory, from where columns of 128 rows are stored. The words of a column are rotated by a
/// number that depends on the column, so that no two units of a plane use the same bank.
#[cube(launch, address_type = "dynamic")]
pub(in crate::fp8) fn cast_kernel<F: Float, N: Size, M: Size>(
    x: &[Vector<F, N>],
    amax: &[f32],
    straight: &mut [Vector<u8, M>],
    transposed: &mut [Vector<u32, Const<4>>],
    scale_inv: &mut [f32],
    sizes: CastSizes,
    largest: f32,
    #[comptime] variant: CastVariant,
    #[define(F)] _dtype: ElemType,
) {
    let words = comptime!((if variant.transposed { TILE * WORDS } else { 1 }) as usize);
    let mut tile = Shared::<[u32]>::new_slice(words);
    let amax = amax[0usize];
    let scale = scale_of(amax, largest, variant.power_of_two);
    if UNIT_POS == 0 && CUBE_POS_X == 0 && CUBE_POS_Y == 0 {
        scale_inv[0usize] = inverse_of(amax, scale);
    }
    let first_row = from_the_end(CUBE_POS_Y, CUBE_COUNT_Y) * comptime!(TILE);
    let first_col = CUBE_POS_X * comptime!(TILE);
    let group = UNIT_POS % comptime!(GROUPS);
    let col = first_col + group * comptime!(COLS);
    #[unroll]
    for pass in 0..PASSES {
        let word = UNIT_POS / comptime!(GROUPS) + pass * comptime!(UNITS / GROUPS);
        let row = first_row + word * comptime!(ROWS);
        let values = load::<F, N>(x, row, col, scale, &sizes);
        if comptime!(variant.straight) {
            #[unroll]
            for i in 0..ROWS {
                let at = comptime!((i * COLS) as usize);
                let low = pack_from(&values, at, 1usize, variant.e5m2);
                let high = pack_from(&values, comptime!(at + 4), 1usize, variant.e5m2);
                if row + i < sizes.rows {
                    store::<M>(straight, low, high, row + i, col, &sizes);
                }
            }
        }
        if comptime!(variant.transposed) {
            #[unroll]
            for i in 0..COLS {
                let column = pack_from(
                    &values,
                    comptime!(i as usize),
                    comptime!(COLS as usize),
                    variant.e5m2,
                );
                let at = place(group * comptime!(COLS) + i, word);
                tile[at] = column;
            }
        }
    }
    if comptime!(variant.transposed) {
        sync_cube();
        let vector = UNIT_POS % comptime!(VECTORS);
        let row = first_row + vector * comptime!(ROWS * VECTOR);
        #[unroll]
        for i in 0..comptime!(TILE * VECTORS / UNITS) {
            let place_of_col = UNIT_POS / comptime!(VECTORS) + i * comptime!(UNITS / VECTORS);
            let col = first_col + place_of_col;
            if col < sizes.cols && row < sizes.padded {
                let mut four = Vector::<u32, Const<4>>::new(0u32);
                #[unroll]
                for word in 0..VECTOR {
                    let at = place(place_of_col, vector * comptime!(VECTOR) + word);
                    four.insert(comptime!(word as usize), tile[at]);
                }
                let to = col as usize * (sizes.padded / 16) as usize + (row / 16) as usize;
                transposed[to] = four;
            }
        }
    }
}

/// The tile of a cube: the last rows come first. The kernel that found the largest magnitude read
/// them last, and the L2 cache may still have them.
#[cube]
fn from_the_end(cube: u32, cubes: u32) -> u32 {
    cubes - 1 - cube
}

/// Loads four rows of eight columns, times the scale; 0 outside of the matrix.
#[cube]
fn load<F: Float, N: Size>(
    x: &[Vector<F, N>],
    row: u32,
    col: u32,
    scale: f32,
    sizes: &CastSizes,
) -> Array<f32> {
    let lanes = N::value();
    let parts = comptime!(COLS as usize / lanes);
    let mut loaded = Array::<Vector<F, N>>::new(comptime!(ROWS as usize * parts));
    #[unroll]
    for i in 0..comptime!(ROWS as usize) {
        let from = (row + i as u32) as usize * sizes.stride as usize;
        #[unroll]
        for part in 0..parts {
            let col = col + comptime!((part * lanes) as u32);
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if row + (i as u32) < sizes.rows && col < sizes.cols {
                value = x[from + col as usize / lanes];
            }
            loaded[comptime!(i * parts + part)] = value;
        }
    }
    let mut values = Array::<f32>::new(comptime!((ROWS * COLS) as usize));
    #[unroll]
    for i in 0..comptime!(ROWS as usize * parts) {
        #[unroll]
        for lane in 0..lanes {
            let value = f32::cast_from(loaded[i].extract(lane));
            values[comptime!(i * lanes + lane)] = value * scale;
        }
    }
    values
}

/// Packs four of the values, `step` apart.
#[cube]
fn pack_from(
    values: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] step: usize,
    #[comptime] e5m2: bool,
) -> u32 {
    let a = values[first];
    let b = values[comptime!(first + step)];
    let c = values[comptime!(first + 2 * step)];
    let d = values[comptime!(first + 3 * step)];
    pack(a, b, c, d, e5m2)
}

/// Stores eight columns of a row: at once, or byte by byte where rows do not begin at multiples of
/// eight bytes.
#[cube]
fn store<M: Size>(
    straight: &mut [Vector<u8, M>],
    low: u32,
    high: u32,
    row: u32,
    col: u32,
    sizes: &CastSizes,
) {
    let first = row as usize * sizes.cols as usize + col as usize;
    let bytes = M::value();
    if comptime!(bytes == COLS as usize) {
        if col < sizes.cols {
            let mut both = Vector::<u32, Const<2>>::new(low);
            both.insert(1usize, high);
            straight[first / comptime!(COLS as usize)] = Vector::reinterpret(both);
        }
    } else {
        #[unroll]
        for i in 0..COLS {
            if col + i < sizes.cols {
                let word = if comptime!(i < 4) { low } else { high };
                let byte = u8::cast_from((word >> comptime!(i % 4 * 8)) & 0xffu32);
                straight[first + comptime!(i as usize)] = Vector::cast_from(byte);
            }
        }
    }
}

/// The place in shared memory of a word of a column of the tile.
#[cube]
fn place(col: u32, word: u32) -> usize {
    let rotated = (word + col / comptime!(COLS) * 2 + col % VECTOR) % comptime!(WORDS);
    (col * comptime!(WORDS) + rotated) as usize
}

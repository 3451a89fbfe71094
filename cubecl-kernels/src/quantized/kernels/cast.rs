use cubecl::prelude::*;

use super::convert::{inverse_of, pack, scale_of};
use super::loads::{Loads, numbers};
use super::{CastSizes, CastVariant};

/// Rows and columns of the tile that a cube casts.
pub(in crate::quantized) const TILE: u32 = 128;
/// Units of a cube.
pub(in crate::quantized) const UNITS: u32 = 256;
/// Adjacent columns that a unit casts.
pub(super) const COLS: u32 = 8;
/// Adjacent rows that a unit casts at a time: a word of the transpose.
pub(super) const ROWS: u32 = 4;
/// Units that share rows of a tile.
pub(super) const GROUPS: u32 = TILE / COLS;
/// Words of a column that a cube casts at a time.
pub(super) const STEP: u32 = UNITS / GROUPS;
/// How often a unit casts rows of the tile.
pub(super) const PASSES: u32 = WORDS / STEP;
/// Words of a column of the tile.
pub(super) const WORDS: u32 = TILE / ROWS;
/// Words that a unit stores at once to the transpose, and such vectors of a column of the tile.
pub(super) const VECTOR: u32 = 4;
const VECTORS: u32 = WORDS / VECTOR;

/// Words of a tile of a range of rows: the index of the range, its first row and end, the first row
/// of the tile, and where the matrix and its transpose begin, in steps of [`PLACE`] bytes.
pub(in crate::quantized) const TILE_WORDS: u32 = 6;
/// The results of ranges begin at multiples of this number of bytes.
pub(in crate::quantized) const PLACE: usize = 512;
/// From the scale of one range to that of the next, in numbers.
pub(in crate::quantized) const SCALES: usize = PLACE / 4;

/// Casts a matrix, with a cube for each tile, and writes the inverse of its scale. A result that
/// the variant does not have may be any buffer, and `tiles` too if it has no ranges: they describe
/// the tiles of ranges, along y.
///
/// A unit converts rows of 8 columns, 4 at a time. It stores the rows, as two words or as bytes,
/// and puts the columns, a word each, into shared memory, from where columns of 128 rows are
/// stored.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn cast_kernel<E: Numeric, F: Float, W: Numeric, N: Size, M: Size>(
    x: &[Vector<E, N>],
    amax: &[f32],
    tiles: &[u32],
    straight: &mut [Vector<W, M>],
    transposed: &mut [Vector<u32, Const<4>>],
    scale_inv: &mut [f32],
    sizes: CastSizes,
    largest: f32,
    #[comptime] variant: CastVariant,
    #[define(E, F, W)] _dtypes: [ElemType; 3],
) {
    let mut tile = Shared::<[u32]>::new_slice(comptime!(tile_words(variant.transposed)));
    let tile_row = from_the_end(CUBE_POS_Y, CUBE_COUNT_Y);
    let mut part = Part {
        range: 0u32,
        begin: 0u32,
        end: sizes.rows,
        first_row: tile_row * comptime!(TILE),
        padded: sizes.padded,
        straight: 0u32,
        transposed: 0u32,
    };
    if comptime!(variant.ranged) {
        let at = (tile_row * comptime!(TILE_WORDS)) as usize;
        part.range = tiles[at];
        part.begin = tiles[at + 1];
        part.end = tiles[at + 2];
        part.first_row = tiles[at + 3];
        part.straight = tiles[at + 4];
        part.transposed = tiles[at + 5];
        part.padded = (part.end - part.begin).div_ceil(16u32) * 16u32;
    }
    let first_row = part.first_row;
    let first_col = CUBE_POS_X * comptime!(TILE);
    let group = UNIT_POS % comptime!(GROUPS);
    let first_word = UNIT_POS / comptime!(GROUPS);
    let row = first_row + first_word * comptime!(ROWS);
    let col = first_col + group * comptime!(COLS);
    let loaded = load::<E, N>(x, row, col, part.end, &sizes, variant.loads.per_element);
    let amax = amax[part.range as usize];
    let scale = scale_of(amax, largest, variant.power_of_two);
    if UNIT_POS == 0 && CUBE_POS_X == 0 && first_row == part.begin {
        scale_inv[part.range as usize * comptime!(SCALES)] = inverse_of(amax, scale);
    }
    #[unroll]
    for pass in 0..PASSES {
        let row = row + pass * comptime!(STEP * ROWS);
        let word = first_word + pass * comptime!(STEP);
        let values = scaled::<E, F, N>(&loaded, scale, pass, variant.loads);
        if comptime!(variant.straight) {
            #[unroll]
            for i in 0..ROWS {
                let at = comptime!((i * COLS) as usize);
                let low = pack_from(&values, at, 1usize, variant.e5m2);
                let high = pack_from(&values, comptime!(at + 4), 1usize, variant.e5m2);
                if row + i < part.end {
                    let row = row + i - part.begin;
                    let base = part.straight as usize * comptime!(PLACE);
                    store::<W, M>(straight, low, high, row, col, base, &sizes);
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
                let turn = group * 2 + comptime!(i % VECTOR);
                let at = place(group * comptime!(COLS) + i, word, turn);
                tile[at] = column;
            }
        }
    }
    if comptime!(variant.transposed) {
        sync_cube();
        store_columns(
            &tile,
            transposed,
            first_row - part.begin,
            first_col,
            part.transposed as usize * comptime!(PLACE / 16),
            part.padded,
            sizes.cols,
        );
    }
}

/// The words of shared memory that hold a transposed tile.
pub(super) const fn tile_words(is_transposed: bool) -> usize {
    if is_transposed {
        (TILE * WORDS) as usize
    } else {
        1
    }
}

/// A tile of a range of rows; of the whole matrix without ranges.
#[derive(CubeType, Clone, Copy)]
struct Part {
    range: u32,
    /// The first row of the range.
    begin: u32,
    /// The end of the range.
    end: u32,
    /// The first row of the tile.
    first_row: u32,
    /// The bytes of a row of the range's transpose.
    padded: u32,
    /// Where the range's matrix begins.
    straight: u32,
    /// Where its transpose begins.
    transposed: u32,
}

/// The tile of a cube: the last rows come first. The kernel that found the largest magnitude read
/// them last, and the L2 cache may still have them.
#[cube]
fn from_the_end(cube: u32, cubes: u32) -> u32 {
    cubes - 1 - cube
}

/// Loads a unit's rows of eight columns in all passes; 0 outside of the matrix.
#[cube]
pub(super) fn load<E: Numeric, N: Size>(
    x: &[Vector<E, N>],
    row: u32,
    col: u32,
    end: u32,
    sizes: &CastSizes,
    #[comptime] per_element: usize,
) -> Array<Vector<E, N>> {
    let size = N::value();
    let lanes = comptime!(size * per_element);
    let parts = comptime!(COLS as usize / lanes);
    let mut loaded = Array::<Vector<E, N>>::new(comptime!((PASSES * ROWS) as usize * parts));
    #[unroll]
    for i in 0..comptime!(PASSES * ROWS) {
        let row = row + comptime!(i / ROWS * STEP * ROWS + i % ROWS);
        let from = row as usize * sizes.stride as usize;
        #[unroll]
        for part in 0..parts {
            let col = col + comptime!((part * lanes) as u32);
            let mut value = Vector::<E, N>::new(E::from_int(0));
            if row < end && col < sizes.cols {
                value = x[from + col as usize / lanes];
            }
            loaded[comptime!(i as usize * parts + part)] = value;
        }
    }
    loaded
}

/// The numbers of a pass, row by row, times the scale.
#[cube]
pub(super) fn scaled<E: Numeric, F: Float, N: Size>(
    loaded: &Array<Vector<E, N>>,
    scale: f32,
    #[comptime] pass: u32,
    #[comptime] loads: Loads,
) -> Array<f32> {
    let size = N::value();
    let lanes = comptime!(size * loads.per_element);
    let vectors = comptime!((ROWS * COLS) as usize / lanes);
    let mut values = Array::<f32>::new(comptime!((ROWS * COLS) as usize));
    #[unroll]
    for i in 0..vectors {
        let vector = loaded[comptime!(pass as usize * vectors + i)];
        #[unroll]
        for element in 0..size {
            let found = numbers::<E, F>(vector.extract(element), loads);
            #[unroll]
            for j in 0..loads.per_element {
                let to = comptime!(i * lanes + element * loads.per_element + j);
                values[to] = found[j] * scale;
            }
        }
    }
    values
}

/// Packs four of the values, `step` apart.
#[cube]
pub(super) fn pack_from(
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

/// Stores eight columns of a row: as two words or, where rows do not begin at multiples of eight
/// bytes, byte by byte.
#[cube]
pub(super) fn store<W: Numeric, M: Size>(
    straight: &mut [Vector<W, M>],
    low: u32,
    high: u32,
    row: u32,
    col: u32,
    base: usize,
    sizes: &CastSizes,
) {
    let first = base + row as usize * sizes.cols as usize + col as usize;
    let words = M::value();
    if comptime!(words == 2) {
        if col < sizes.cols {
            let mut both = Vector::<W, M>::new(W::cast_from(low));
            both.insert(1usize, W::cast_from(high));
            straight[first / comptime!(COLS as usize)] = both;
        }
    } else {
        #[unroll]
        for i in 0..COLS {
            if col + i < sizes.cols {
                let word = if comptime!(i < 4) { low } else { high };
                let byte = W::cast_from((word >> comptime!(i % 4 * 8)) & 0xffu32);
                straight[first + comptime!(i as usize)] = Vector::new(byte);
            }
        }
    }
}

/// Stores the columns of a tile from shared memory to a transpose that begins at a vector and has
/// `padded` bytes in a row.
#[cube]
pub(super) fn store_columns(
    tile: &Shared<[u32]>,
    transposed: &mut [Vector<u32, Const<4>>],
    first_row: u32,
    first_col: u32,
    base: usize,
    padded: u32,
    cols: u32,
) {
    let vector = UNIT_POS % comptime!(VECTORS);
    let of_unit = UNIT_POS / comptime!(VECTORS);
    let row = first_row + vector * comptime!(ROWS * VECTOR);
    let turn = of_unit / comptime!(COLS) * 2 + of_unit % comptime!(VECTOR);
    #[unroll]
    for i in 0..comptime!(TILE * VECTORS / UNITS) {
        let jump = comptime!(i * UNITS / VECTORS);
        let col = first_col + of_unit + jump;
        let mut four = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for word in 0..VECTOR {
            let turn = turn + comptime!(jump / COLS * 2);
            let at = place(of_unit + jump, vector * comptime!(VECTOR) + word, turn);
            four.insert(comptime!(word as usize), tile[at]);
        }
        if col < cols && row < padded {
            let to = col as usize * (padded / 16) as usize + (row / 16) as usize;
            transposed[base + to] = four;
        }
    }
}

/// The place in shared memory of a word of a column. The words of a column are rotated by a number
/// that is twice that of its eight columns and one more for each of four, so that no two units of a
/// plane use the same bank, whether they write words of a row or read vectors of four columns.
#[cube]
pub(super) fn place(col: u32, word: u32, turn: u32) -> usize {
    (col * comptime!(WORDS) + (word + turn) % comptime!(WORDS)) as usize
}

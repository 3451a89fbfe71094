//! The cast of a matrix to FP8 whose neighbours or blocks have scales of their own.

use cubecl::prelude::*;

use super::cast::{
    COLS, GROUPS, PASSES, ROWS, STEP, TILE, UNITS, VECTOR, load, pack_from, place, scaled, store,
    store_columns, tile_words,
};
use super::convert::{inverse_of, scale_of};
use super::loads::Loads;
use super::numbers::number;
use super::{BlockCastVariant, CastSizes};
use crate::kernel_parts::PLANE;

const PLANES: u32 = UNITS / PLANE;
/// Numbers of a unit in a pass.
const VALUES: u32 = ROWS * COLS;

/// Where scales of a matrix and its transpose are: the numbers from one row of them to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::quantized) struct ScalePitches {
    pub(in crate::quantized) straight: u32,
    pub(in crate::quantized) transposed: u32,
    /// The rows of the matrix with its padding.
    pub(in crate::quantized) padded_rows: u32,
}

/// Casts a matrix in tiles of 128 by 128, with a cube for each. In a `square` variant a tile has one
/// scale; otherwise the matrix has one for each 128 neighbours of a row, and its transpose one for
/// each 128 neighbours of a column. A result that the variant does not have may be any buffer.
///
/// The units cast as those of [`cast_kernel`](super::cast_kernel), after they found the largest
/// magnitudes: of the rows in half a plane each, of the columns in shared memory.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn block_cast_kernel<
    E: Numeric,
    F: Float,
    W: Numeric,
    N: Size,
    M: Size,
>(
    x: &[Vector<E, N>],
    straight: &mut [Vector<W, M>],
    straight_scales: &mut [f32],
    transposed: &mut [Vector<u32, Const<4>>],
    transposed_scales: &mut [f32],
    sizes: CastSizes,
    pitches: ScalePitches,
    largest: f32,
    #[comptime] variant: BlockCastVariant,
    #[define(E, F, W)] _dtypes: [ElemType; 3],
) {
    let mut tile = Shared::<[u32]>::new_slice(comptime!(tile_words(variant.transposed)));
    let group = UNIT_POS % comptime!(GROUPS);
    let first_word = UNIT_POS / comptime!(GROUPS);
    let at = Position {
        tile_row: CUBE_POS_Y,
        tile_col: CUBE_POS_X,
        row: CUBE_POS_Y * comptime!(TILE) + first_word * comptime!(ROWS),
        col: CUBE_POS_X * comptime!(TILE) + group * comptime!(COLS),
    };
    let loaded = load::<E, N>(
        x,
        at.row,
        at.col,
        sizes.rows,
        &sizes,
        variant.loads.per_element,
    );
    let mut of_rows = Array::<u32>::new(comptime!((PASSES * ROWS) as usize));
    let mut of_cols = Array::<u32>::new(comptime!(COLS as usize));
    magnitudes::<E, F, N>(&loaded, &mut of_rows, &mut of_cols, variant.loads);
    let mut row_scales = Array::<f32>::new(comptime!((PASSES * ROWS) as usize));
    let mut col_scales = Array::<f32>::new(comptime!(COLS as usize));
    if comptime!(variant.square) {
        let amax = tile_amax(&of_cols);
        let scale = scale_of(amax, largest, variant.power_of_two);
        if UNIT_POS == 0 {
            let inverse = inverse_of(amax, scale);
            if comptime!(variant.straight) {
                let to = at.tile_row * pitches.straight + at.tile_col;
                straight_scales[to as usize] = inverse;
            }
            if comptime!(variant.transposed) {
                let to = at.tile_col * pitches.transposed + at.tile_row;
                transposed_scales[to as usize] = inverse;
            }
        }
        #[unroll]
        for i in 0..comptime!(PASSES * ROWS) {
            row_scales[comptime!(i as usize)] = scale;
        }
        #[unroll]
        for i in 0..COLS {
            col_scales[comptime!(i as usize)] = scale;
        }
    } else {
        if comptime!(variant.straight) {
            scale_rows(
                &of_rows,
                &mut row_scales,
                straight_scales,
                &at,
                &pitches,
                largest,
                variant.power_of_two,
            );
        }
        if comptime!(variant.transposed) {
            scale_cols(
                &of_cols,
                &mut col_scales,
                transposed_scales,
                &at,
                pitches.transposed,
                sizes.cols,
                largest,
                variant.power_of_two,
            );
        }
    }

    #[unroll]
    for pass in 0..PASSES {
        let row = at.row + pass * comptime!(STEP * ROWS);
        let word = first_word + pass * comptime!(STEP);
        let values = scaled::<E, F, N>(&loaded, 1.0, pass, variant.loads);
        if comptime!(variant.straight) {
            let mut by_rows = Array::<f32>::new(comptime!(VALUES as usize));
            #[unroll]
            for i in 0..VALUES {
                let scale = row_scales[comptime!((pass * ROWS + i / COLS) as usize)];
                by_rows[comptime!(i as usize)] = values[comptime!(i as usize)] * scale;
            }
            #[unroll]
            for i in 0..ROWS {
                let from = comptime!((i * COLS) as usize);
                let low = pack_from(&by_rows, from, 1usize, variant.e5m2);
                let high = pack_from(&by_rows, comptime!(from + 4), 1usize, variant.e5m2);
                if row + i < pitches.padded_rows {
                    store::<W, M>(straight, low, high, row + i, at.col, 0usize, &sizes);
                }
            }
        }
        if comptime!(variant.transposed) {
            let mut by_cols = Array::<f32>::new(comptime!(VALUES as usize));
            #[unroll]
            for i in 0..VALUES {
                let scale = col_scales[comptime!((i % COLS) as usize)];
                by_cols[comptime!(i as usize)] = values[comptime!(i as usize)] * scale;
            }
            #[unroll]
            for i in 0..COLS {
                let column = pack_from(
                    &by_cols,
                    comptime!(i as usize),
                    comptime!(COLS as usize),
                    variant.e5m2,
                );
                let turn = group * 2 + comptime!(i % VECTOR);
                let to = place(group * comptime!(COLS) + i, word, turn);
                tile[to] = column;
            }
        }
    }
    if comptime!(variant.transposed) {
        sync_cube();
        store_columns(
            &tile,
            transposed,
            CUBE_POS_Y * comptime!(TILE),
            CUBE_POS_X * comptime!(TILE),
            0usize,
            sizes.padded,
            sizes.cols,
        );
    }
}

/// Where a unit is: its tile, and its first row and column in the matrix.
#[derive(CubeType, Clone, Copy)]
struct Position {
    tile_row: u32,
    tile_col: u32,
    row: u32,
    col: u32,
}

/// The largest magnitudes, as bits, of a unit's rows and columns.
#[cube]
fn magnitudes<E: Numeric, F: Float, N: Size>(
    loaded: &Array<Vector<E, N>>,
    of_rows: &mut Array<u32>,
    of_cols: &mut Array<u32>,
    #[comptime] loads: Loads,
) {
    #[unroll]
    for i in 0..COLS {
        of_cols[comptime!(i as usize)] = u32::new(0);
    }
    #[unroll]
    for pass in 0..PASSES {
        let values = scaled::<E, F, N>(loaded, 1.0, pass, loads);
        #[unroll]
        for i in 0..ROWS {
            let mut most = u32::new(0);
            #[unroll]
            for j in 0..COLS {
                let value = values[comptime!((i * COLS + j) as usize)];
                let magnitude = u32::reinterpret(value) & 0x7fff_ffffu32;
                most = max(most, magnitude);
                let at = comptime!(j as usize);
                of_cols[at] = max(of_cols[at], magnitude);
            }
            of_rows[comptime!((pass * ROWS + i) as usize)] = most;
        }
    }
}

/// The largest magnitude of a tile.
#[cube]
fn tile_amax(of_cols: &Array<u32>) -> f32 {
    let mut found = Shared::<[u32]>::new_slice(comptime!(PLANES as usize));
    let mut own = u32::new(0);
    #[unroll]
    for i in 0..COLS {
        own = max(own, of_cols[comptime!(i as usize)]);
    }
    let of_plane = plane_max(own);
    let lane = UNIT_POS % PLANE;
    if lane == 0 {
        found[(UNIT_POS / PLANE) as usize] = of_plane;
    }
    sync_cube();
    let mut most = u32::new(0);
    #[unroll]
    for plane in 0..PLANES {
        most = max(most, found[comptime!(plane as usize)]);
    }
    f32::reinterpret(most)
}

/// The scales of a unit's rows in the tile. The 16 units that have the same rows are half a plane.
#[cube]
fn scale_rows(
    of_rows: &Array<u32>,
    row_scales: &mut Array<f32>,
    scale_inv: &mut [f32],
    at: &Position,
    pitches: &ScalePitches,
    largest: f32,
    #[comptime] power_of_two: bool,
) {
    let group = UNIT_POS % comptime!(GROUPS);
    #[unroll]
    for i in 0..comptime!(PASSES * ROWS) {
        let own = of_rows[comptime!(i as usize)];
        let most = max(own, plane_shuffle_xor(own, 1u32));
        let most = max(most, plane_shuffle_xor(most, 2u32));
        let most = max(most, plane_shuffle_xor(most, 4u32));
        let most = max(most, plane_shuffle_xor(most, 8u32));
        let amax = f32::reinterpret(most);
        let scale = scale_of(amax, largest, power_of_two);
        row_scales[comptime!(i as usize)] = scale;
        let row = at.row + comptime!(i / ROWS * STEP * ROWS + i % ROWS);
        if group == 0 && row < pitches.padded_rows {
            let to = at.tile_col * pitches.straight + row;
            scale_inv[to as usize] = inverse_of(amax, scale);
        }
    }
}

/// The scales of a unit's columns in the tile, from those of all units through shared memory.
#[cube]
fn scale_cols(
    of_cols: &Array<u32>,
    col_scales: &mut Array<f32>,
    scale_inv: &mut [f32],
    at: &Position,
    pitch: u32,
    cols: u32,
    largest: f32,
    #[comptime] power_of_two: bool,
) {
    let mut found = Shared::<[u32]>::new_slice(comptime!((PLANES * TILE) as usize));
    let mut scales = Shared::<[f32]>::new_slice(comptime!(TILE as usize));
    let group = UNIT_POS % comptime!(GROUPS);
    #[unroll]
    for i in 0..COLS {
        let own = of_cols[comptime!(i as usize)];
        // The other half of the plane has the same columns.
        let most = max(own, plane_shuffle_xor(own, GROUPS));
        if UNIT_POS % PLANE < GROUPS {
            let plane = UNIT_POS / PLANE;
            found[(plane * TILE + group * COLS + i) as usize] = most;
        }
    }
    sync_cube();
    if UNIT_POS < TILE {
        let mut most = u32::new(0);
        #[unroll]
        for plane in 0..PLANES {
            most = max(most, found[(plane * TILE + UNIT_POS) as usize]);
        }
        let amax = f32::reinterpret(most);
        let scale = scale_of(amax, largest, power_of_two);
        scales[UNIT_POS as usize] = scale;
        let col = at.tile_col * TILE + UNIT_POS;
        if col < cols {
            scale_inv[(at.tile_row * pitch + col) as usize] = inverse_of(amax, scale);
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..COLS {
        col_scales[comptime!(i as usize)] = scales[(group * COLS + i) as usize];
    }
}

/// The numbers that the bytes of a matrix with `cols` columns stand for, times their factors. In a
/// `square` variant blocks of 128 by 128 have a factor; otherwise 128 neighbours do, whose factors are
/// transposed.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn block_values_kernel(
    values: &[u8],
    scale_inv: &[f32],
    out: &mut [f32],
    cols: usize,
    pitch: usize,
    #[comptime] square: bool,
    #[comptime] e5m2: bool,
) {
    if ABSOLUTE_POS < out.len() {
        let row = ABSOLUTE_POS / cols;
        let block = ABSOLUTE_POS % cols / comptime!(TILE as usize);
        let at = if comptime!(square) {
            row / comptime!(TILE as usize) * pitch + block
        } else {
            block * pitch + row
        };
        out[ABSOLUTE_POS] = number(u32::cast_from(values[ABSOLUTE_POS]), e5m2) * scale_inv[at];
    }
}

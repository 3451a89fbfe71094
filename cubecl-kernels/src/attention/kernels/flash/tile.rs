//! Tiles in shared memory and on tensor cores, for forward and backward.
//!
//! A tile has rows of one head, each a query, key or value. It consists of consecutive panels of 64
//! columns, in which a row has 128 bytes. The 16-byte chunks of a row are permuted by the row's
//! number, so that the eight rows that `ldmatrix` reads at a time are in different banks: the
//! 128-byte swizzle that Hopper's `wgmma` reads. Columns up to the next multiple of 16 are zero.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

pub(super) use crate::kernel_parts::tensor_cores::{PANEL, Pair};

/// Elements of a chunk, which is 16 bytes.
const CHUNK: usize = 8;
/// Columns that one tensor-core product sums over.
pub(super) const STEP: usize = 16;

/// Elements that a row of `d` elements takes in shared memory.
pub(in crate::attention) fn row_len(d: usize) -> usize {
    d.next_multiple_of(PANEL)
}

/// Steps over the columns of a row of `d` elements.
pub(super) fn steps(d: usize) -> usize {
    d.div_ceil(STEP)
}

/// The layout of one head's rows in a buffer.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::attention) struct Rows {
    /// Elements from one position to the next.
    pub(in crate::attention) position: usize,
    /// Elements from one sequence of the batch to the next.
    pub(in crate::attention) batch: usize,
    /// Elements from one head to the next.
    pub(in crate::attention) head: usize,
    /// The number of positions.
    pub(in crate::attention) len: u32,
}

/// The element index of a chunk in a tile of `rows` rows.
#[cube]
fn place(row: u32, chunk: u32, #[comptime] rows: usize) -> usize {
    let swapped = (chunk % 8) ^ (row % 8);
    (chunk / 8) as usize * comptime!(rows * PANEL) + row as usize * PANEL + swapped as usize * CHUNK
}

/// Starts to copy `rows` rows from position `first` on; rows past the last are zero. `start` is the
/// element at position 0 of the head, and `at` is where the tile starts in `to`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "source, destination and shape of the copy"
)]
pub(super) fn copy_tile<F: Float>(
    from: &[F],
    of: &Rows,
    start: usize,
    first: u32,
    to: &mut Shared<[F]>,
    at: usize,
    #[comptime] rows: usize,
    #[comptime] d: usize,
    #[comptime] units: usize,
) {
    let chunks = comptime!(steps(d) * STEP / CHUNK);
    let row_sum = comptime!(rows * chunks);
    // If a unit's chunks are all in one column, their addresses are computed once for all tiles.
    let in_column = comptime!(units.is_multiple_of(8 * chunks));
    let step = comptime!(if in_column { units / chunks } else { 0 });
    #[unroll]
    for i in 0..comptime!(row_sum.div_ceil(units)) {
        let ahead = comptime!(if in_column { 0 } else { i * units });
        let index = UNIT_POS + comptime!(ahead as u32);
        let all = comptime!(row_sum.is_multiple_of(units));
        if all || UNIT_POS + comptime!((i * units) as u32) < comptime!(row_sum as u32) {
            let row = index / comptime!(chunks as u32);
            let chunk = index % comptime!(chunks as u32);
            let first = first + comptime!((i * step) as u32);
            let mut is_there = first + row < of.len;
            if comptime!(!d.is_multiple_of(STEP)) {
                is_there = is_there && chunk < comptime!((d / CHUNK) as u32);
            }
            let of_tile = start + first as usize * of.position;
            let source = of_tile + (row as usize * of.position + chunk as usize * CHUNK);
            let len = select(is_there, CHUNK.runtime(), 0usize);
            let target = at + comptime!(i * step * PANEL) + place(row, chunk, rows);
            copy_async_checked(
                &from[source..source + len],
                &mut to[target..target + CHUNK],
                comptime!(CHUNK as u32),
            );
        }
    }
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until all of this unit's copies have arrived.
#[cube]
pub(super) fn wait_for_copies() {
    gpu_asm!("cp.async.wait_group 0;");
}

/// Loads rows `row..row + 16`, columns `16 step..16 step + 16` as a left operand; or, transposed,
/// as two right operands of 8 columns each, for sums over the rows.
#[cube]
fn block<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    tile: &Shared<[F]>,
    at: usize,
    row: u32,
    #[comptime] step: usize,
    #[comptime] rows: usize,
    #[comptime] transposed: bool,
) -> Array<Pair<F>> {
    let lane = UNIT_POS_X;
    let from = at
        + place(
            row + lane % 16,
            comptime!(2 * step as u32) + lane / 16,
            rows,
        );
    mma.load_matrix::<F, Const<2>>(
        &tile[from..from + CHUNK],
        MatrixIdent::A,
        4usize,
        transposed,
    )
}

/// Loads rows `row..row + 16` as the columns of two right operands of 8 columns each, for sums over
/// columns `16 step..16 step + 16` of the tile.
#[cube]
fn mma_b_of_rows<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    tile: &Shared<[F]>,
    at: usize,
    row: u32,
    #[comptime] step: usize,
    #[comptime] rows: usize,
) -> Array<Pair<F>> {
    let lane = UNIT_POS_X;
    let chunk = comptime!(2 * step as u32) + lane / 8 % 2;
    let from = at + place(row + lane / 16 * 8 + lane % 8, chunk, rows);
    mma.load_matrix::<F, Const<2>>(&tile[from..from + CHUNK], MatrixIdent::A, 4usize, false)
}

/// Adds the product of `a` with the two right operands in `b` to the sums `at` and `at + 1`. Each
/// sum is two pairs: of the lane's row, and of the row eight below.
#[cube]
fn add_products<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    a: &Array<Pair<F>>,
    b: &Array<Pair<F>>,
    sums: &mut Array<Pair<f32>>,
    #[comptime] at: usize,
) {
    #[unroll]
    for half in 0..2 {
        let mut operand = Array::<Pair<F>>::new(2usize);
        operand[0] = b[comptime!(2 * half)];
        operand[1] = b[comptime!(2 * half + 1)];
        let mut sum = Array::<Pair<f32>>::new(2usize);
        sum[0] = sums[comptime!(2 * (at + half))];
        sum[1] = sums[comptime!(2 * (at + half) + 1)];
        mma.execute_inplace(a, &operand, &mut sum);
        sums[comptime!(2 * (at + half))] = sum[0];
        sums[comptime!(2 * (at + half) + 1)] = sum[1];
    }
}

/// Converts the sums of columns `16 step..16 step + 16` to a left operand, within registers.
#[cube]
fn as_mma_a<F: Float>(
    sums: &Array<Pair<f32>>,
    #[comptime] at: usize,
    #[comptime] step: usize,
) -> Array<Pair<F>> {
    let mut operand = Array::<Pair<F>>::new(4usize);
    #[unroll]
    for i in 0..4 {
        operand[i] = Pair::<F>::cast_from(sums[comptime!(2 * (at + 2 * step) + i)]);
    }
    operand
}

/// Zeros for `row_blocks` row blocks of 16 rows and `tiles` tiles of 8 columns. Tile `t` of row
/// block `n` is at `2 * (n * tiles + t)`: the lane's row, then the row eight below.
#[cube]
pub(super) fn zeros(#[comptime] row_blocks: usize, #[comptime] tiles: usize) -> Array<Pair<f32>> {
    let mut sums = Array::<Pair<f32>>::new(comptime!(2 * row_blocks * tiles));
    #[unroll]
    for i in 0..comptime!(2 * row_blocks * tiles) {
        sums[i] = Pair::<f32>::new(0.0);
    }
    sums
}

/// The products of rows with rows: `row_blocks` row blocks of 16 from `row` on of the tile at
/// `at_left` with all `columns` rows of the tile at `at_right`. The rows of both have `d` elements;
/// the left tile has `left_rows` rows.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "two operands and the product's shape"
)]
pub(super) fn multiply_rows<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    tiles: &Shared<[F]>,
    at_left: usize,
    row: u32,
    at_right: usize,
    #[comptime] left_rows: usize,
    #[comptime] row_blocks: usize,
    #[comptime] columns: usize,
    #[comptime] d: usize,
) -> Array<Pair<f32>> {
    let mut sums = zeros(row_blocks, comptime!(columns / 8));
    #[unroll]
    for step in 0..comptime!(steps(d)) {
        let mut a = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for row_block in 0..row_blocks {
            let row = row + comptime!(16 * row_block as u32);
            a.push(block::<F>(mma, tiles, at_left, row, step, left_rows, false));
        }
        #[unroll]
        for pair in 0..comptime!(columns / 16) {
            let row = comptime!(16 * pair as u32).runtime();
            let b = mma_b_of_rows::<F>(mma, tiles, at_right, row, step, columns);
            #[unroll]
            for row_block in 0..row_blocks {
                let at = comptime!(row_block * columns / 8 + 2 * pair);
                add_products::<F>(mma, a.index(row_block), &b, &mut sums, at);
            }
        }
    }
    sums
}

/// Adds to `sums` the products of `weights`, which have `rows` columns, with the tile of `rows`
/// rows of `d` elements at `at_right`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "two operands and the product's shape"
)]
pub(super) fn add_columns<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    weights: &Array<Pair<f32>>,
    tiles: &Shared<[F]>,
    at_right: usize,
    sums: &mut Array<Pair<f32>>,
    #[comptime] row_blocks: usize,
    #[comptime] rows: usize,
    #[comptime] d: usize,
) {
    #[unroll]
    for step in 0..comptime!(rows / 16) {
        let mut a = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for row_block in 0..row_blocks {
            a.push(as_mma_a::<F>(
                weights,
                comptime!(row_block * rows / 8),
                step,
            ));
        }
        #[unroll]
        for pair in 0..comptime!(steps(d)) {
            let row = comptime!(16 * step as u32).runtime();
            let b = block::<F>(mma, tiles, at_right, row, pair, rows, true);
            #[unroll]
            for row_block in 0..row_blocks {
                let at = comptime!(row_block * steps(d) * 2 + 2 * pair);
                add_products::<F>(mma, a.index(row_block), &b, sums, at);
            }
        }
    }
}

/// Writes the lane's part of row `half` of a row block, times `factor`. The row starts at pair
/// `to`.
#[cube]
pub(super) fn write_row<F: Float>(
    sums: &Array<Pair<f32>>,
    factor: f32,
    out: &mut [Pair<F>],
    to: usize,
    #[comptime] row_block: usize,
    #[comptime] half: usize,
    #[comptime] d: usize,
) {
    let to = to + (UNIT_POS_X % 4) as usize;
    #[unroll]
    for column in 0..comptime!(d / 8) {
        let pair = sums[comptime!(2 * (row_block * steps(d) * 2 + column) + half)];
        out[to + comptime!(4 * column)] = Pair::<F>::cast_from(pair * Pair::<f32>::new(factor));
    }
}

/// `index` counted from the end.
#[cube]
pub(super) fn reversed_index(index: u32, count: u32) -> u32 {
    count - 1 - index
}

/// `2^x` by the single instruction for it; 0 for minus infinity.
#[cube]
pub(super) fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// The maximum of a row, whose values are spread over four adjacent lanes.
#[cube]
pub(super) fn reduce_row_max(x: f32) -> f32 {
    let x = max(x, plane_shuffle_xor(x, 1u32));
    max(x, plane_shuffle_xor(x, 2u32))
}

/// The sum of a row, whose values are spread over four adjacent lanes.
#[cube]
pub(super) fn reduce_row_sum(x: f32) -> f32 {
    let x = x + plane_shuffle_xor(x, 1u32);
    x + plane_shuffle_xor(x, 2u32)
}

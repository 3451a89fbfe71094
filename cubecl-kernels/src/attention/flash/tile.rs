//! Tiles in shared memory and on tensor cores: what the forward and the backward are made of.
//!
//! A tile is rows of one head, each a query, key or value: one panel of 64 columns behind the other,
//! in which a row has 128 bytes. Its chunks of 16 bytes are swapped by the row's number, so that the
//! eight rows that `ldmatrix` reads at a time lie in different banks: the layout with a swizzle of 128
//! bytes that Hopper's own products read. Columns up to the next multiple of 16 are zero.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

pub(super) use crate::cube::tensor_cores::{PANEL, Pair};

/// Elements of a chunk, which is 16 bytes.
const CHUNK: usize = 8;
/// Columns that one product of tensor cores sums over.
pub(super) const STEP: usize = 16;

/// Elements that a row of `d` takes in shared memory.
pub(super) fn row_len(d: usize) -> usize {
    d.next_multiple_of(PANEL)
}

/// Steps over the columns of a row of `d`.
pub(super) fn steps(d: usize) -> usize {
    d.div_ceil(STEP)
}

/// Where rows of one head lie in a buffer.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Rows {
    /// Elements from a position to the next.
    pub(super) position: usize,
    /// Elements from a sequence of the batch to the next.
    pub(super) batch: usize,
    /// Elements from a head to the next.
    pub(super) head: usize,
    /// Positions.
    pub(super) len: u32,
}

/// Of a chunk in a tile of `rows`.
#[cube]
fn place(row: u32, chunk: u32, #[comptime] rows: usize) -> usize {
    let swapped = (chunk % 8) ^ (row % 8);
    (chunk / 8) as usize * comptime!(rows * PANEL) + row as usize * PANEL + swapped as usize * CHUNK
}

/// Asks for `rows` rows from position `first` on; those behind the last are zero. `start` is the
/// element where position 0 of the head begins, `at` the tile's place.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a copy has two ends and a shape")]
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
    // Where a unit's chunks are all in one column, it computes their places once for all tiles.
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

/// Waits until all of this unit's copies are there.
#[cube]
pub(super) fn wait_for_copies() {
    gpu_asm!("cp.async.wait_group 0;");
}

/// Rows `row..row + 16`, columns `16 step..16 step + 16`: a left operand; or, transposed, two right
/// operands of 8 columns each, summed over the rows.
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

/// Rows `row..row + 16` as the columns of two right operands of 8, summed over columns
/// `16 step..16 step + 16` of the tile.
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

/// Adds the product of `a` with the two right operands in `b` to the sums `at` and `at + 1`, which
/// are two pairs each: of a lane's row, and of the row eight below.
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

/// The sums of columns `16 step..16 step + 16` as a left operand, without leaving the registers.
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

/// Numbers that start at zero: of each of `stretches` times 16 rows, `tiles` times 8 columns. The
/// tile `t` of stretch `n` is at `2 * (n * tiles + t)`, a lane's row and then the one eight below.
#[cube]
pub(super) fn zeros(#[comptime] stretches: usize, #[comptime] tiles: usize) -> Array<Pair<f32>> {
    let mut sums = Array::<Pair<f32>>::new(comptime!(2 * stretches * tiles));
    #[unroll]
    for i in 0..comptime!(2 * stretches * tiles) {
        sums[i] = Pair::<f32>::new(0.0);
    }
    sums
}

/// The products of rows with rows: of `stretches` times 16 from `row` on of the tile at `at_left`
/// with all `columns` of the one at `at_right`, both rows of `d`; the left tile has `left_rows`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "a product has two operands and a shape"
)]
pub(super) fn multiply_rows<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    tiles: &Shared<[F]>,
    at_left: usize,
    row: u32,
    at_right: usize,
    #[comptime] left_rows: usize,
    #[comptime] stretches: usize,
    #[comptime] columns: usize,
    #[comptime] d: usize,
) -> Array<Pair<f32>> {
    let mut sums = zeros(stretches, comptime!(columns / 8));
    #[unroll]
    for step in 0..comptime!(steps(d)) {
        let mut a = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for stretch in 0..stretches {
            let row = row + comptime!(16 * stretch as u32);
            a.push(block::<F>(mma, tiles, at_left, row, step, left_rows, false));
        }
        #[unroll]
        for pair in 0..comptime!(columns / 16) {
            let row = comptime!(16 * pair as u32).runtime();
            let b = mma_b_of_rows::<F>(mma, tiles, at_right, row, step, columns);
            #[unroll]
            for stretch in 0..stretches {
                let at = comptime!(stretch * columns / 8 + 2 * pair);
                add_products::<F>(mma, a.index(stretch), &b, &mut sums, at);
            }
        }
    }
    sums
}

/// Adds to `sums` the products of `weights`, `rows` of them in a row, with the columns of the tile of
/// `rows` rows of `d` at `at_right`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "a product has two operands and a shape"
)]
pub(super) fn add_columns<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    weights: &Array<Pair<f32>>,
    tiles: &Shared<[F]>,
    at_right: usize,
    sums: &mut Array<Pair<f32>>,
    #[comptime] stretches: usize,
    #[comptime] rows: usize,
    #[comptime] d: usize,
) {
    #[unroll]
    for step in 0..comptime!(rows / 16) {
        let mut a = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for stretch in 0..stretches {
            a.push(as_mma_a::<F>(weights, comptime!(stretch * rows / 8), step));
        }
        #[unroll]
        for pair in 0..comptime!(steps(d)) {
            let row = comptime!(16 * step as u32).runtime();
            let b = block::<F>(mma, tiles, at_right, row, pair, rows, true);
            #[unroll]
            for stretch in 0..stretches {
                let at = comptime!(stretch * steps(d) * 2 + 2 * pair);
                add_products::<F>(mma, a.index(stretch), &b, sums, at);
            }
        }
    }
}

/// Writes a lane's part of row `half` of a stretch, times `factor`, where the row begins at pair `to`.
#[cube]
pub(super) fn write_row<F: Float>(
    sums: &Array<Pair<f32>>,
    factor: f32,
    out: &mut [Pair<F>],
    to: usize,
    #[comptime] stretch: usize,
    #[comptime] half: usize,
    #[comptime] d: usize,
) {
    let to = to + (UNIT_POS_X % 4) as usize;
    #[unroll]
    for column in 0..comptime!(d / 8) {
        let pair = sums[comptime!(2 * (stretch * steps(d) * 2 + column) + half)];
        out[to + comptime!(4 * column)] = Pair::<F>::cast_from(pair * Pair::<f32>::new(factor));
    }
}

/// The place of `index` counted from the end.
#[cube]
pub(super) fn reversed_index(index: u32, count: u32) -> u32 {
    count - 1 - index
}

/// `2^x` by the one instruction there is for it; 0 for minus infinity.
#[cube]
pub(super) fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// Sums or maxima of a row lie in four neighbouring lanes.
#[cube]
pub(super) fn reduce_row_max(x: f32) -> f32 {
    let x = max(x, plane_shuffle_xor(x, 1u32));
    max(x, plane_shuffle_xor(x, 2u32))
}

#[cube]
pub(super) fn reduce_row_sum(x: f32) -> f32 {
    let x = x + plane_shuffle_xor(x, 1u32);
    x + plane_shuffle_xor(x, 2u32)
}

//! Grouped-GEMM kernels: each cube computes 128 rows and 128 or 256 columns of a result.

mod assembly;
mod shape;

use cubecl::prelude::*;

use crate::kernel_parts::assembly::value;
use crate::kernel_parts::tensor_cores::{Pair, address, descriptor, size_is, split};
use assembly::sums;
use shape::{CHUNK, Side, TERMS, UNITS};
pub(super) use shape::{Major, ROWS, Shape};

/// A first term past the end of every sum: nothing is copied.
const NONE: u32 = 1 << 30;

/// Planes per cube.
pub(super) const PLANES: u32 = (UNITS / 32) as u32;

define_size!(Sums);

/// How a unit copies its chunks of one operand.
#[derive(CubeType, Clone, Copy)]
struct Copies {
    /// The address in the first stage of its first chunk.
    to: u32,
    /// The address that the chunk is copied from.
    from: u64,
    /// The byte distances to its next chunk of the same step, and to its chunk of the next step.
    jump: u64,
    ahead: u64,
    /// The number of valid chunks, for `Major::Terms`.
    limit: u32,
    /// The first term of its chunk; for `Major::Lines`, of its first chunk.
    first: u32,
}

/// The copies of an operand whose first line of this cube is at address `from`. Rows are `stride`
/// elements apart, and `lines` lines are left from there on.
#[cube]
fn copies(from: u64, stride: u32, lines: u32, at: u32, #[comptime] side: Side) -> Copies {
    let (chunks, apart) = comptime!((side.chunks() as u32, side.rows_between_pieces() as u32));
    let chunk = UNIT_POS % chunks;
    let row = UNIT_POS / chunks;
    let row_bytes = u64::cast_from(stride) * 2;
    let place = (chunk / 8) * comptime!((side.panel_rows() * TERMS * 2) as u32)
        + row * comptime!((TERMS * 2) as u32)
        + ((chunk % 8) ^ (row % 8)) * comptime!(CHUNK as u32);
    let start =
        from + u64::cast_from(row) * row_bytes + u64::cast_from(chunk * comptime!(CHUNK as u32));
    let left = (max(lines, row) - row + comptime!(apart - 1)) / apart;
    let of_terms = comptime!(side.major == Major::Terms);
    let column = chunk * 8;
    let first = if of_terms {
        column
    } else {
        select(column < lines, row, NONE.runtime())
    };
    let bytes = u64::cast_from(comptime!(TERMS as u32).runtime());
    let ahead = if of_terms {
        bytes * 2
    } else {
        bytes * row_bytes
    };
    Copies {
        to: at + place,
        from: start,
        jump: row_bytes * u64::cast_from(apart),
        ahead,
        limit: left,
        first,
    }
}

/// Computes this cube's output tile. Each unit returns the accumulators of two rows, eight apart,
/// in pairs of columns, eight apart. `left` and `right` are the addresses of the operands' first
/// lines of this cube; `rows` and `columns` count what is left of the result from there on.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "two operands and the product's shape"
)]
fn multiply<F: Float>(
    left: u64,
    right: u64,
    of_left: u32,
    of_right: u32,
    rows: u32,
    columns: u32,
    terms: u32,
    #[comptime] shape: Shape,
) -> Array<Pair<f32>> {
    let tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared() / 2), 1024usize);
    let (of_a, of_b) = comptime!((shape.left(), shape.right()));
    let at_a = address::<F>(&tiles, 0usize);
    let at_b = at_a + comptime!(of_a.bytes() as u32);
    let a = copies(left, of_left, rows, at_a, of_a);
    let b = copies(right, of_right, columns, at_b, of_b);
    // Four planes (a warpgroup) multiply 64 rows. These occupy the same number of bytes for either
    // `Major`.
    let fourth = plane_broadcast(UNIT_POS_Y, 0u32) / 4;
    let descriptor_a = descriptor(
        at_a + fourth * comptime!((64 * TERMS * 2) as u32),
        comptime!(of_a.panel_rows()),
    );
    let descriptor_b = descriptor(at_b, comptime!(of_b.panel_rows()));
    size_is::<Sums>(comptime!(shape.columns / 2));
    let to_a = value::<u32>(a.to);
    let to_b = value::<u32>(b.to);
    let from_a = value::<u64>(a.from);
    let from_b = value::<u64>(b.from);
    let jump_a = value::<u64>(a.jump);
    let jump_b = value::<u64>(b.jump);
    let ahead_a = value::<u64>(a.ahead);
    let ahead_b = value::<u64>(b.ahead);
    let limit_a = value::<u32>(a.limit);
    let limit_b = value::<u32>(b.limit);
    let first_a = value::<u32>(a.first);
    let first_b = value::<u32>(b.first);
    let terms = value::<u32>(terms);
    let descriptor_a = value::<u64>(descriptor_a);
    let descriptor_b = value::<u64>(descriptor_b);
    let text = comptime!(sums(&shape));
    let found: Vector<f32, Sums>;
    gpu_asm!(
        "{text}{found} {to_a} {to_b} {from_a} {from_b} {jump_a} {jump_b} {ahead_a} {ahead_b} {limit_a} \
         {limit_b} {first_a} {first_b} {terms} {descriptor_a} {descriptor_b}",
        found = out(_) found,
        to_a = in(_) to_a,
        to_b = in(_) to_b,
        from_a = in(_) from_a,
        from_b = in(_) from_b,
        jump_a = in(_) jump_a,
        jump_b = in(_) jump_b,
        ahead_a = in(_) ahead_a,
        ahead_b = in(_) ahead_b,
        limit_a = in(_) limit_a,
        limit_b = in(_) limit_b,
        first_a = in(_) first_a,
        first_b = in(_) first_b,
        terms = in(_) terms,
        descriptor_a = in(_) descriptor_a,
        descriptor_b = in(_) descriptor_b,
    );
    let mut pairs = Array::<Pair<f32>>::new(comptime!(shape.columns / 4));
    split::<Sums>(found, &mut pairs, comptime!(shape.columns / 4));
    pairs
}

/// The address of an element in global memory.
#[cube]
fn place_of<F: Float>(of: &[F], at: usize) -> u64 {
    let address: u64;
    gpu_asm!("mov.b64 {}, {};", out(_) address, in(_) &of[at]);
    address
}

/// Computes `out[range] = x[range] w[range]` for each range of rows.
///
/// # Shapes
/// `x: [r, k]`, rows `of_x` elements apart; `out: [r, n]`; matrices `[k, n]`, or `[n, k]` for
/// `Major::Terms`, rows `of_w` apart. `table` has for each row tile: the address of its matrix, its
/// first row, and the number of rows left of its range.
///
/// The grid is `[n / columns, tiles, 1]`; planes of 32 units lie along x.
#[cube(launch_unchecked)]
#[allow(
    clippy::too_many_arguments,
    reason = "these are the kernel's arguments"
)]
pub(super) fn rows_kernel<F: Float>(
    x: &[F],
    table: &[u64],
    out: &mut [Pair<F>],
    of_x: u32,
    of_w: u32,
    k: u32,
    n: u32,
    #[comptime] shape: Shape,
    #[define(F)] _dtype: ElemType,
) {
    let entry = CUBE_POS_Y as usize * 3;
    let matrix = table[entry];
    let first = table[entry + 1] as usize;
    let rows = u32::cast_from(table[entry + 2]);
    let column = CUBE_POS_X * comptime!(shape.columns as u32);
    let from = place_of::<F>(x, first * of_x as usize);
    let apart = if comptime!(shape.right == Major::Terms) {
        of_w
    } else {
        1u32.runtime()
    };
    let right = matrix + u64::cast_from(column) * u64::cast_from(apart) * 2;
    let sums = multiply::<F>(from, right, of_x, of_w, rows, n - column, k, shape);
    #[unroll]
    for half in 0..2usize {
        let row = UNIT_POS_Y * 16 + UNIT_POS_X / 4 + comptime!(8 * half as u32);
        if row < rows {
            let start = (first + row as usize) * n as usize + column as usize;
            let to = start / 2 + (UNIT_POS_X % 4) as usize;
            #[unroll]
            for i in 0..comptime!(shape.columns / 8) {
                if column + comptime!(8 * i as u32) < n {
                    out[to + comptime!(4 * i)] =
                        Pair::<F>::cast_from(sums[comptime!(2 * i + half)]);
                }
            }
        }
    }
}

/// Computes `sum[range] += x[range]ᵀ dy[range]` for each range of rows, or `=` if there is no sum
/// yet.
///
/// # Shapes
/// `x: [r, m]`, `dy: [r, n]`, rows `of_x` and `of_dy` elements apart; sums `[m, n]` in f32. `table`
/// has for each range: the address of its sum, its first row, its number of rows, and whether there
/// is a sum. `done: [1]` is written by the same launch.
///
/// The grid is `[n / columns, m / rows, ranges]`; planes of 32 units lie along x.
#[cube(launch_unchecked)]
#[allow(
    clippy::too_many_arguments,
    reason = "these are the kernel's arguments"
)]
pub(super) fn weights_kernel<F: Float>(
    x: &[F],
    dy: &[F],
    table: &[u64],
    done: &mut [u32],
    of_x: u32,
    of_dy: u32,
    m: u32,
    n: u32,
    #[comptime] shape: Shape,
    #[define(F)] _dtype: ElemType,
) {
    if CUBE_POS_X + CUBE_POS_Y + CUBE_POS_Z + UNIT_POS == 0 {
        done[0] = 1u32;
    }
    let entry = CUBE_POS_Z as usize * 4;
    let sum = table[entry];
    let first = table[entry + 1] as usize;
    let terms = u32::cast_from(table[entry + 2]);
    let adds = table[entry + 3] > 0;
    if terms == 0 && adds {
        terminate!();
    }
    let top = CUBE_POS_Y * comptime!(ROWS as u32);
    let column = CUBE_POS_X * comptime!(shape.columns as u32);
    if adds {
        prefetch_tile(sum, top, column, m, n, shape);
    }
    let left = place_of::<F>(x, first * of_x as usize + top as usize);
    let right = place_of::<F>(dy, first * of_dy as usize + column as usize);
    let sums = multiply::<F>(left, right, of_x, of_dy, m - top, n - column, terms, shape);
    #[unroll]
    for half in 0..2usize {
        let row = top + UNIT_POS_Y * 16 + UNIT_POS_X / 4 + comptime!(8 * half as u32);
        if row < m {
            let start = u64::cast_from(row) * u64::cast_from(n) + u64::cast_from(column);
            let to = sum + (start + u64::cast_from(UNIT_POS_X % 4 * 2)) * 4;
            #[unroll]
            for i in 0..comptime!(shape.columns / 8) {
                if column + comptime!(8 * i as u32) < n {
                    add_at(
                        to + comptime!(32 * i as u64),
                        sums[comptime!(2 * i + half)],
                        adds,
                    );
                }
            }
        }
    }
}

/// Prefetches this cube's tile of a sum into the L2 cache, where the products are later added to
/// it.
#[cube]
fn prefetch_tile(sum: u64, top: u32, column: u32, m: u32, n: u32, #[comptime] shape: Shape) {
    // A cache line has 32 f32 numbers.
    let lines = comptime!((shape.columns / 32) as u32);
    let rows = comptime!(UNITS as u32) / lines;
    #[unroll]
    for i in 0..comptime!(ROWS * shape.columns / 32 / UNITS) {
        let row = top + UNIT_POS / lines + comptime!(i as u32) * rows;
        let column = column + UNIT_POS % lines * 32;
        if row < m && column < n {
            let number = u64::cast_from(row) * u64::cast_from(n) + u64::cast_from(column);
            let at = value::<u64>(sum + number * 4);
            gpu_asm!("prefetch.global.L2 [{}];", in(_) at);
        }
    }
}

/// Adds two numbers to those at an address, or stores them if nothing is there yet. The L2 cache
/// performs the addition (`red`), so no unit waits for the old value. Each number is added to once,
/// so the result is deterministic.
#[cube]
fn add_at(at: u64, numbers: Pair<f32>, adds: bool) {
    let at = value::<u64>(at);
    let low = value::<f32>(numbers.extract(0usize));
    let high = value::<f32>(numbers.extract(1usize));
    if adds {
        gpu_asm!("red.global.add.v2.f32 [{}], {{{}, {}}};", in(_) at, in(_) low, in(_) high);
    } else {
        gpu_asm!("st.global.v2.f32 [{}], {{{}, {}}};", in(_) at, in(_) low, in(_) high);
    }
}

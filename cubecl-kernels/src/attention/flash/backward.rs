//! The gradients, with scores and probabilities made anew: `P = exp(S - lse)`,
//! `dS = P * (dO V^T - delta)`, `dV = P^T dO`, `dK = dS^T Q * scale`, `dQ = dS K * scale`.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>, algorithm 2; the sums
//! over keys and those over queries are two kernels here, so that each sum has one order and one
//! owner: no atomics, the same bits each time. A plane has 16 rows, keys in the one and queries in
//! the other; scores have that orientation, and pass from one product to the next in registers.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::tile::*;
use super::visible::{Mask, Visible, end_of_keys, end_of_queries, first_key, first_query, sees};

/// Planes of a cube; each has 16 rows.
pub(super) const PLANES: usize = 4;
/// Rows of a cube.
pub(super) const ROWS: usize = 16 * PLANES;
const UNITS: usize = 32 * PLANES;

/// The shape of the work of a cube.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Backward {
    pub(super) d: usize,
    pub(super) d_v: usize,
    /// Rows of the tiles that come by: queries where the cube has keys, keys where it has queries.
    pub(super) tile: usize,
    pub(super) mask: Mask,
    /// Which gradients of keys and of values: both, if there are registers for them.
    pub(super) of_keys: bool,
    pub(super) of_values: bool,
}

impl Backward {
    /// Elements of the cube's own rows.
    fn own(&self) -> usize {
        ROWS * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements of a pair of tiles that come by. There are two pairs: one comes while the other is
    /// multiplied.
    fn stage(&self) -> usize {
        self.tile * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements in shared memory.
    pub(super) fn shared(&self) -> usize {
        self.own() + 2 * self.stage()
    }
}

/// A row's `log2` of the sum of exponentials, plus infinity for a row without a key: no probability
/// of it is other than zero.
#[cube]
fn in_base_2(lse: f32) -> f32 {
    let mut found = lse * f32::new(core::f32::consts::LOG2_E);
    if lse == f32::new(f32::NEG_INFINITY) {
        found = f32::new(f32::INFINITY);
    }
    found
}

/// `P` and `dS` of one element: written over the score and the product `dO V^T`.
#[cube]
fn probability(score: f32, dp: f32, lse: f32, delta: f32, scale: f32, seen: bool) -> (f32, f32) {
    let mut p = exp2(score * scale - lse);
    if !seen {
        p = f32::new(0.0);
    }
    (p, p * (dp - delta))
}

/// Gradients of keys and values. Cubes `[tiles of keys, hkv, b]`.
///
/// # Shapes
/// As [`flash_forward`](super::forward::flash_forward)'s, `dk: [s_k, b, hkv, d]`,
/// `dv: [s_k, b, hkv, d_v]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are its interface")]
pub(super) fn flash_backward_keys<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    dout: &[F],
    lse: &[f32],
    delta: &[f32],
    dk: &mut [Pair<F>],
    dv: &mut [Pair<F>],
    of_q: Rows,
    of_k: Rows,
    of_v: Rows,
    of_dout: Rows,
    visible: Visible,
    group: u32,
    // The factor of scores, with and without log2(e).
    scale_2: f32,
    scale: f32,
    #[comptime] shape: Backward,
    #[define(F)] _dtype: ElemType,
) {
    let Backward { d, d_v, tile, mask, of_keys, of_values } = shape;
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);
    let mut rows = Shared::<[f32]>::new_aligned_slice(comptime!(4 * tile), 16usize);
    let at_v = comptime!(ROWS * row_len(d)).runtime();

    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let (s_q, s_k) = (of_q.len, of_k.len);
    let first = CUBE_POS_X * comptime!(ROWS as u32);
    let start_k = batch as usize * of_k.batch + head as usize * of_k.head;
    let start_v = batch as usize * of_v.batch + head as usize * of_v.head;
    copy_tile::<F>(k, &of_k, start_k, first, &mut tiles, 0usize, ROWS, d, UNITS);
    copy_tile::<F>(v, &of_v, start_v, first, &mut tiles, at_v, ROWS, d_v, UNITS);

    let end = end_of_queries(&visible, min(first + comptime!(ROWS as u32), s_k), s_q, mask);
    let begin = first_query(&visible, first, mask) / comptime!(tile as u32);
    let mut per_head = 0u32;
    if begin * comptime!(tile as u32) < end {
        per_head = (end - begin * comptime!(tile as u32)).div_ceil(comptime!(tile as u32));
    }
    let count = per_head * group;

    let row = UNIT_POS_Y * 16;
    let mut sum_k = zeros(1usize, comptime!(if of_keys { 2 * steps(d) } else { 0 }));
    let mut sum_v = zeros(1usize, comptime!(if of_values { 2 * steps(d_v) } else { 0 }));
    let mut index = 0u32;
    // One round more than there are tiles: the first only asks for one.
    while index <= count {
        wait_for_copies(0usize);
        sync_cube();
        if index < count {
            let i = (begin + index % per_head) * comptime!(tile as u32);
            let of_head = head * group + index / per_head;
            let stage = index % 2;
            let at = comptime!(shape.own()) + stage as usize * comptime!(shape.stage());
            let start = batch as usize * of_q.batch + of_head as usize * of_q.head;
            copy_tile::<F>(q, &of_q, start, i, &mut tiles, at, tile, d, UNITS);
            let start = batch as usize * of_dout.batch + of_head as usize * of_dout.head;
            let at = at + comptime!(tile * row_len(d));
            copy_tile::<F>(dout, &of_dout, start, i, &mut tiles, at, tile, d_v, UNITS);
            if UNIT_POS < comptime!(tile as u32) {
                let mut of_row = f32::new(f32::INFINITY);
                let mut delta_of_row = f32::new(0.0);
                if i + UNIT_POS < s_q {
                    let heads = CUBE_COUNT_Y * group;
                    let at = ((batch * heads + of_head) * s_q + i + UNIT_POS) as usize;
                    of_row = in_base_2(lse[at]);
                    delta_of_row = delta[at];
                }
                let at = (stage * comptime!(2 * tile as u32) + UNIT_POS) as usize;
                rows[at] = of_row;
                rows[at + tile] = delta_of_row;
            }
        }
        if index > 0 {
            let done = index - 1;
            let i = (begin + done % per_head) * comptime!(tile as u32);
            let at_q = comptime!(shape.own()) + (done % 2) as usize * comptime!(shape.stage());
            let at_dout = at_q + comptime!(tile * row_len(d));
            let mut p = multiply_rows::<F>(&mma, &tiles, 0usize, row, at_q, 1usize, tile, d);
            let mut ds = multiply_rows::<F>(&mma, &tiles, at_v, row, at_dout, 1usize, tile, d_v);
            #[unroll]
            for block in 0..comptime!(tile / 8) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(2 * block + half);
                    let j = first + row + UNIT_POS_X / 4 + comptime!(8 * half as u32);
                    let (mut of_p, mut of_ds) = (p[at], ds[at]);
                    #[unroll]
                    for side in 0..2usize {
                        let column = comptime!((8 * block + side) as u32) + UNIT_POS_X % 4 * 2;
                        let seen = sees(&visible, i + column, j, s_k, mask);
                        let of_row = ((done % 2) * comptime!(2 * tile as u32) + column) as usize;
                        let (one, other) = probability(
                            of_p.extract(side),
                            of_ds.extract(side),
                            rows[of_row],
                            rows[of_row + tile],
                            scale_2,
                            seen,
                        );
                        of_p.insert(side, one);
                        of_ds.insert(side, other);
                    }
                    p[at] = of_p;
                    ds[at] = of_ds;
                }
            }
            if comptime!(of_values) {
                add_columns::<F>(&mma, &p, &tiles, at_dout, &mut sum_v, 1usize, tile, d_v);
            }
            if comptime!(of_keys) {
                add_columns::<F>(&mma, &ds, &tiles, at_q, &mut sum_k, 1usize, tile, d);
            }
        }
        index += 1;
    }

    #[unroll]
    for half in 0..2usize {
        let j = first + row + UNIT_POS_X / 4 + comptime!(8 * half as u32);
        if j < s_k {
            let place = ((j * CUBE_COUNT_Z + batch) * CUBE_COUNT_Y + head) as usize;
            if comptime!(of_keys) {
                let to = place * comptime!(d / 2);
                write_row::<F>(&sum_k, scale, dk, to, 0usize, half, d);
            }
            if comptime!(of_values) {
                let to = place * comptime!(d_v / 2);
                write_row::<F>(&sum_v, f32::new(1.0), dv, to, 0usize, half, d_v);
            }
        }
    }
}

/// Gradients of queries. Cubes `[tiles of queries, hq, b]`.
///
/// # Shapes
/// As [`flash_forward`](super::forward::flash_forward)'s, `dq: [s_q, b, hq, d]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are its interface")]
pub(super) fn flash_backward_queries<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    dout: &[F],
    lse: &[f32],
    delta: &[f32],
    dq: &mut [Pair<F>],
    of_q: Rows,
    of_k: Rows,
    of_v: Rows,
    of_dout: Rows,
    visible: Visible,
    group: u32,
    // The factor of scores, with and without log2(e).
    scale_2: f32,
    scale: f32,
    #[comptime] shape: Backward,
    #[define(F)] _dtype: ElemType,
) {
    let Backward { d, d_v, tile, mask, .. } = shape;
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);
    let at_dout = comptime!(ROWS * row_len(d)).runtime();

    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let (s_q, s_k) = (of_q.len, of_k.len);
    // The last queries see the most keys: they go first.
    let first = from_behind(CUBE_POS_X, CUBE_COUNT_X) * comptime!(ROWS as u32);
    let of_head = (head / group) as usize;
    let start_q = batch as usize * of_q.batch + head as usize * of_q.head;
    let start_dout = batch as usize * of_dout.batch + head as usize * of_dout.head;
    let start_k = batch as usize * of_k.batch + of_head * of_k.head;
    let start_v = batch as usize * of_v.batch + of_head * of_v.head;
    copy_tile::<F>(q, &of_q, start_q, first, &mut tiles, 0usize, ROWS, d, UNITS);
    copy_tile::<F>(dout, &of_dout, start_dout, first, &mut tiles, at_dout, ROWS, d_v, UNITS);

    let row = UNIT_POS_Y * 16;
    let mut lse_of = Array::<f32>::new(2usize);
    let mut delta_of = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let i = first + row + UNIT_POS_X / 4 + comptime!(8 * half as u32);
        lse_of[half] = f32::new(f32::INFINITY);
        delta_of[half] = f32::new(0.0);
        if i < s_q {
            let at = ((batch * CUBE_COUNT_Y + head) * s_q + i) as usize;
            lse_of[half] = in_base_2(lse[at]);
            delta_of[half] = delta[at];
        }
    }

    let end = end_of_keys(&visible, min(first + comptime!(ROWS as u32), s_q), s_k, mask);
    let begin = first_key(&visible, first, mask) / comptime!(tile as u32);
    let mut count = 0u32;
    if begin * comptime!(tile as u32) < end {
        count = (end - begin * comptime!(tile as u32)).div_ceil(comptime!(tile as u32));
    }
    let mut sum = zeros(1usize, comptime!(2 * steps(d)));
    let mut index = 0u32;
    // One round more than there are tiles: the first only asks for one.
    while index <= count {
        wait_for_copies(0usize);
        sync_cube();
        if index < count {
            let j = (begin + index) * comptime!(tile as u32);
            let at = comptime!(shape.own()) + (index % 2) as usize * comptime!(shape.stage());
            copy_tile::<F>(k, &of_k, start_k, j, &mut tiles, at, tile, d, UNITS);
            let at = at + comptime!(tile * row_len(d));
            copy_tile::<F>(v, &of_v, start_v, j, &mut tiles, at, tile, d_v, UNITS);
        }
        if index > 0 {
            let done = index - 1;
            let j = (begin + done) * comptime!(tile as u32);
            let at_k = comptime!(shape.own()) + (done % 2) as usize * comptime!(shape.stage());
            let at_v = at_k + comptime!(tile * row_len(d));
            let p = multiply_rows::<F>(&mma, &tiles, 0usize, row, at_k, 1usize, tile, d);
            let mut ds = multiply_rows::<F>(&mma, &tiles, at_dout, row, at_v, 1usize, tile, d_v);
            #[unroll]
            for block in 0..comptime!(tile / 8) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(2 * block + half);
                    let i = first + row + UNIT_POS_X / 4 + comptime!(8 * half as u32);
                    let (of_p, mut of_ds) = (p[at], ds[at]);
                    #[unroll]
                    for side in 0..2usize {
                        let column = comptime!((8 * block + side) as u32) + UNIT_POS_X % 4 * 2;
                        let seen = sees(&visible, i, j + column, s_k, mask);
                        let (_, other) = probability(
                            of_p.extract(side),
                            of_ds.extract(side),
                            lse_of[half],
                            delta_of[half],
                            scale_2,
                            seen,
                        );
                        of_ds.insert(side, other);
                    }
                    ds[at] = of_ds;
                }
            }
            add_columns::<F>(&mma, &ds, &tiles, at_k, &mut sum, 1usize, tile, d);
        }
        index += 1;
    }

    #[unroll]
    for half in 0..2usize {
        let i = first + row + UNIT_POS_X / 4 + comptime!(8 * half as u32);
        if i < s_q {
            let to = ((i * CUBE_COUNT_Z + batch) * CUBE_COUNT_Y + head) as usize;
            let to = to * comptime!(d / 2);
            write_row::<F>(&sum, scale, dq, to, 0usize, half, d);
        }
    }
}

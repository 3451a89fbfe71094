//! Gradients of keys and values: a cube has a tile of keys, and the queries that see them come by.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::backward::Backward;
use super::dropped::{Dropout, factors_of_queries};
use super::score::{Scale, cap, in_base_2, probability};
use super::tile::*;
use super::visible::{Side, Visible, queries_of, within};

/// Cubes `[tiles of keys, hkv, b]`.
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
    bounds: &[i32],
    of_q: Rows,
    of_k: Rows,
    of_v: Rows,
    of_dout: Rows,
    visible: Visible,
    group: u32,
    of_scores: Scale,
    dropout: Dropout,
    #[comptime] shape: Backward,
    #[define(F)] _dtype: ElemType,
) {
    let Backward { d, d_v, tile, mask, capped, dropped, of_keys, of_values, .. } = shape;
    let (own_rows, units) = comptime!((shape.rows(), shape.units()));
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);
    let mut rows = Shared::<[f32]>::new_aligned_slice(comptime!(4 * tile), 16usize);
    let at_v = comptime!(own_rows * row_len(d)).runtime();

    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let (s_q, s_k) = (of_q.len, of_k.len);
    let first = CUBE_POS_X * comptime!(own_rows as u32);
    let start_k = batch as usize * of_k.batch + head as usize * of_k.head;
    let start_v = batch as usize * of_v.batch + head as usize * of_v.head;
    copy_tile::<F>(k, &of_k, start_k, first, &mut tiles, 0usize, own_rows, d, units);
    copy_tile::<F>(v, &of_v, start_v, first, &mut tiles, at_v, own_rows, d_v, units);

    let last = min(first + comptime!(own_rows as u32), s_k) - 1;
    let of_first = queries_of(&visible, bounds, batch, first, s_q, s_k, mask);
    let of_last = queries_of(&visible, bounds, batch, last, s_q, s_k, mask);
    let end = of_last.end as u32;
    let begin = of_first.begin as u32 / comptime!(tile as u32);
    let mut per_head = 0u32;
    if begin * comptime!(tile as u32) < end {
        per_head = (end - begin * comptime!(tile as u32)).div_ceil(comptime!(tile as u32));
    }
    let count = per_head * group;

    let row = UNIT_POS_Y * 16;
    let own = first + row + UNIT_POS_X / 4;
    let seen_by = queries_of(&visible, bounds, batch, own, s_q, s_k, mask);
    let below_seen_by = queries_of(&visible, bounds, batch, own + 8, s_q, s_k, mask);
    let mut sum_k = zeros(1usize, comptime!(if of_keys { 2 * steps(d) } else { 0 }));
    let mut sum_v = zeros(1usize, comptime!(if of_values { 2 * steps(d_v) } else { 0 }));
    let mut index = 0u32;
    // One round more than there are tiles: the first only asks for one.
    while index <= count {
        wait_for_copies();
        sync_cube();
        if index < count {
            let i = (begin + index % per_head) * comptime!(tile as u32);
            let of_head = head * group + index / per_head;
            let stage = index % 2;
            let at = comptime!(shape.own()) + stage as usize * comptime!(shape.stage());
            let start = batch as usize * of_q.batch + of_head as usize * of_q.head;
            copy_tile::<F>(q, &of_q, start, i, &mut tiles, at, tile, d, units);
            let start = batch as usize * of_dout.batch + of_head as usize * of_dout.head;
            let at = at + comptime!(tile * row_len(d));
            copy_tile::<F>(dout, &of_dout, start, i, &mut tiles, at, tile, d_v, units);
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
            cap(&mut p, &of_scores, comptime!(tile / 4), capped);
            let mut ds = multiply_rows::<F>(&mma, &tiles, at_v, row, at_dout, 1usize, tile, d_v);
            #[unroll]
            for block in 0..comptime!(tile / 8) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(2 * block + half);
                    let span = comptime![if half == 0 { &seen_by } else { &below_seen_by }];
                    let (mut of_p, mut of_ds) = (p[at], ds[at]);
                    let of_head = head * group + done / per_head;
                    let query = i + comptime!((8 * block) as u32) + UNIT_POS_X % 4 * 2;
                    let key = own + comptime!(8 * half as u32);
                    let factors = factors_of_queries(&dropout, batch, of_head, query, key, dropped);
                    #[unroll]
                    for side in 0..2usize {
                        let column = comptime!((8 * block + side) as u32) + UNIT_POS_X % 4 * 2;
                        let seen = within(span, i + column, mask, Side::Queries);
                        let of_row = ((done % 2) * comptime!(2 * tile as u32) + column) as usize;
                        let (one, other) = probability(
                            of_p.extract(side),
                            of_ds.extract(side),
                            rows[of_row],
                            rows[of_row + tile],
                            of_scores.base_2,
                            seen,
                            comptime![if side == 0 { factors.0 } else { factors.1 }],
                            capped,
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
                write_row::<F>(&sum_k, of_scores.factor, dk, to, 0usize, half, d);
            }
            if comptime!(of_values) {
                let to = place * comptime!(d_v / 2);
                write_row::<F>(&sum_v, f32::new(1.0), dv, to, 0usize, half, d_v);
            }
        }
    }
}

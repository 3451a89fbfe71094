//! Gradients of keys and values: a cube has a tile of keys, and loops over the tiles of queries
//! that see them.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::cube_shape::Backward;
use super::dropped::{Dropout, Dropped, factors_of_queries};
use super::products::{add_columns, meet, multiply_rows, settle};
use super::score::{Scale, add_bias, cap, gradient, in_base_2, kept, number, probability};
use super::tile::{Pair, Rows, copy_tile, row_len, steps, write_row, zeros};
use super::visible::{Side, Visible, hide, queries_of};

/// Computes `dk` and `dv` from the saved LSE and `delta`. Cubes are `[tiles of keys, hkv, b]`.
///
/// # Shapes
/// As in [`flash_forward`](super::forward::flash_forward); `dk: [s_k, b, hkv, d]`,
/// `dv: [s_k, b, hkv, d_v]`.
#[cube(launch_unchecked)]
#[allow(
    clippy::too_many_arguments,
    reason = "these are the kernel's arguments"
)]
pub(in crate::attention) fn flash_backward_keys<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    dout: &[F],
    lse: &[f32],
    delta: &[f32],
    dk: &mut [Pair<F>],
    dv: &mut [Pair<F>],
    bounds: &[i32],
    line: &[f32],
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
    let Backward {
        d,
        d_v,
        tile,
        mask,
        capped,
        biased,
        dropped,
        of_keys,
        of_values,
        products,
        ..
    } = shape;
    let (own_rows, units) = comptime!((shape.rows(), shape.units()));
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);
    let mut rows = Shared::<[f32]>::new_aligned_slice(comptime!(4 * tile), 16usize);
    let at_v = comptime!(own_rows * row_len(d)).runtime();

    let head = CUBE_POS_Y;
    let batch = CUBE_POS_Z;
    let s_q = of_q.len;
    let s_k = of_k.len;
    let first = CUBE_POS_X * comptime!(own_rows as u32);
    let start_k = batch as usize * of_k.batch + head as usize * of_k.head;
    let start_v = batch as usize * of_v.batch + head as usize * of_v.head;
    copy_tile::<F>(
        k, &of_k, start_k, first, &mut tiles, 0usize, own_rows, d, units,
    );
    copy_tile::<F>(
        v, &of_v, start_v, first, &mut tiles, at_v, own_rows, d_v, units,
    );

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
    let mut sum_v = zeros(
        1usize,
        comptime!(if of_values { 2 * steps(d_v) } else { 0 }),
    );
    let count_of_tile = comptime!(tile / 4);
    let mut index = 0u32;
    // Query tile and head of the copy in flight, and of the tile that has arrived.
    let mut asked_tile = 0u32;
    let mut asked_head = 0u32;
    let mut done_tile = 0u32;
    let mut done_head = 0u32;
    // One iteration more than there are tiles: the first only starts a copy.
    while index <= count {
        meet(products);
        // LSE and delta of the tile that is being copied; they are loaded while the other tile is
        // multiplied.
        let mut of_row = f32::new(f32::INFINITY);
        let mut delta_of_row = f32::new(0.0);
        if index < count {
            let i = (begin + asked_tile) * comptime!(tile as u32);
            let of_head = head * group + asked_head;
            let stage = index % 2;
            let at = comptime!(shape.own()) + stage as usize * comptime!(shape.stage());
            let start = batch as usize * of_q.batch + of_head as usize * of_q.head;
            copy_tile::<F>(q, &of_q, start, i, &mut tiles, at, tile, d, units);
            let start = batch as usize * of_dout.batch + of_head as usize * of_dout.head;
            let at = at + comptime!(tile * row_len(d));
            copy_tile::<F>(dout, &of_dout, start, i, &mut tiles, at, tile, d_v, units);
            if UNIT_POS < comptime!(tile as u32) && i + UNIT_POS < s_q {
                let heads = CUBE_COUNT_Y * group;
                let at = ((batch * heads + of_head) * s_q + i + UNIT_POS) as usize;
                of_row = lse[at];
                delta_of_row = delta[at];
            }
        }
        if index > 0 {
            let done = index - 1;
            let i = (begin + done_tile) * comptime!(tile as u32);
            let at_q = comptime!(shape.own()) + (done % 2) as usize * comptime!(shape.stage());
            let at_dout = at_q + comptime!(tile * row_len(d));
            let at_rows = (done % 2) * comptime!(2 * tile as u32);
            let mut p = multiply_rows::<F>(
                &mma, &tiles, 0usize, at_q, own_rows, 1usize, tile, d, products,
            );
            let mut ds = zeros(1usize, comptime!(if of_keys { tile / 8 } else { 0 }));
            if comptime!(of_keys) {
                ds = multiply_rows::<F>(
                    &mma, &tiles, at_v, at_dout, own_rows, 1usize, tile, d_v, products,
                );
            }
            // Probabilities are computed while `dO V^T` is in flight, their gradients while
            // `P^T dO` is.
            settle(
                &mut p,
                count_of_tile,
                comptime!(usize::from(of_keys)),
                products,
            );
            cap(&mut p, &of_scores, count_of_tile, capped);
            let under_cap = kept(&p, count_of_tile, capped);
            let is_dropped = comptime!(dropped != Dropped::No);
            let mut after_dropout = kept(&p, count_of_tile, is_dropped);
            let of_head = head * group + done_head;
            add_bias(
                &mut p,
                line,
                &of_scores,
                of_head,
                own,
                i,
                s_q,
                s_k,
                count_of_tile,
                Side::Queries,
                biased,
            );
            // Whether some query of the tile does not see some key of the cube.
            let next = i + comptime!(tile as u32);
            if next as i32 > of_first.end || (i as i32) < of_last.begin {
                hide(
                    &mut p,
                    &seen_by,
                    &below_seen_by,
                    i,
                    count_of_tile,
                    mask,
                    Side::Queries,
                );
            }
            #[unroll]
            for at in 0..count_of_tile {
                let mut of_p = p[at];
                #[unroll]
                for side in 0..2usize {
                    let column = comptime!((at / 2 * 8 + side) as u32) + UNIT_POS_X % 4 * 2;
                    let lse = rows[(at_rows + column) as usize];
                    of_p.insert(side, probability(of_p.extract(side), lse, of_scores.base_2));
                }
                p[at] = of_p;
                if comptime!(is_dropped) {
                    let query = i + comptime!((at / 2 * 8) as u32) + UNIT_POS_X % 4 * 2;
                    let key = own + comptime!((at % 2 * 8) as u32);
                    let (one, other) =
                        factors_of_queries(&dropout, batch, of_head, query, key, dropped);
                    of_p.insert(0usize, of_p.extract(0usize) * one);
                    of_p.insert(1usize, of_p.extract(1usize) * other);
                    after_dropout[at] = of_p;
                }
            }
            let weights = comptime![if is_dropped { &after_dropout } else { &p }];
            if comptime!(of_values) {
                add_columns::<F>(
                    &mma, weights, &tiles, at_dout, &mut sum_v, 1usize, tile, d_v, products,
                );
            }
            if comptime!(of_keys) {
                settle(
                    &mut ds,
                    count_of_tile,
                    comptime!(usize::from(of_values)),
                    products,
                );
                #[unroll]
                for at in 0..count_of_tile {
                    let mut of_ds = ds[at];
                    #[unroll]
                    for side in 0..2usize {
                        let column = comptime!((at / 2 * 8 + side) as u32) + UNIT_POS_X % 4 * 2;
                        let delta = rows[(at_rows + comptime!(tile as u32) + column) as usize];
                        let of_row = gradient(
                            p[at].extract(side),
                            number(weights, at, side),
                            of_ds.extract(side),
                            delta,
                            number(comptime![if capped { &under_cap } else { &p }], at, side),
                            capped,
                        );
                        of_ds.insert(side, of_row);
                    }
                    ds[at] = of_ds;
                }
                add_columns::<F>(
                    &mma, &ds, &tiles, at_q, &mut sum_k, 1usize, tile, d, products,
                );
            }
            settle(
                &mut sum_v,
                comptime!(if of_values { 4 * steps(d_v) } else { 0 }),
                0usize,
                products,
            );
            settle(
                &mut sum_k,
                comptime!(if of_keys { 4 * steps(d) } else { 0 }),
                0usize,
                products,
            );
        }
        if UNIT_POS < comptime!(tile as u32) {
            let at = (index % 2 * comptime!(2 * tile as u32) + UNIT_POS) as usize;
            rows[at] = in_base_2(of_row);
            rows[at + tile] = delta_of_row;
        }
        index += 1;
        done_tile = asked_tile;
        done_head = asked_head;
        asked_tile += 1;
        if asked_tile == per_head {
            asked_tile = 0u32;
            asked_head += 1;
        }
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

//! Gradients of queries: a cube has a tile of queries, and loops over the tiles of keys that they
//! see.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::cube_shape::Backward;
use super::dropped::{Dropout, factors_of_keys};
use super::products::{add_columns, meet, multiply_rows, settle};
use super::score::{Scale, add_bias, cap, gradient, in_base_2, kept, number, probability};
use super::tile::{Pair, Rows, copy_tile, reversed_index, row_len, steps, write_row, zeros};
use super::visible::{Side, Visible, hide, keys_of};

/// Computes `dq` from the saved LSE and `delta`. Cubes are `[tiles of queries, hq, b]`.
///
/// # Shapes
/// As in [`flash_forward`](super::forward::flash_forward); `dq: [s_q, b, hq, d]`.
#[cube(launch_unchecked)]
#[allow(
    clippy::too_many_arguments,
    reason = "these are the kernel's arguments"
)]
pub(in crate::attention) fn flash_backward_queries<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    dout: &[F],
    lse: &[f32],
    delta: &[f32],
    dq: &mut [Pair<F>],
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
        products,
        ..
    } = shape;
    let (own_rows, units) = comptime!((shape.rows(), shape.units()));
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);
    let at_dout = comptime!(own_rows * row_len(d)).runtime();

    let head = CUBE_POS_Y;
    let batch = CUBE_POS_Z;
    let s_q = of_q.len;
    let s_k = of_k.len;
    // With a causal mask the last queries see the most keys; the longest work starts first.
    let first = reversed_index(CUBE_POS_X, CUBE_COUNT_X) * comptime!(own_rows as u32);
    let of_head = (head / group) as usize;
    let start_q = batch as usize * of_q.batch + head as usize * of_q.head;
    let start_dout = batch as usize * of_dout.batch + head as usize * of_dout.head;
    let start_k = batch as usize * of_k.batch + of_head * of_k.head;
    let start_v = batch as usize * of_v.batch + of_head * of_v.head;
    copy_tile::<F>(
        q, &of_q, start_q, first, &mut tiles, 0usize, own_rows, d, units,
    );
    copy_tile::<F>(
        dout, &of_dout, start_dout, first, &mut tiles, at_dout, own_rows, d_v, units,
    );

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

    let last = min(first + comptime!(own_rows as u32), s_q) - 1;
    let of_first = keys_of(&visible, bounds, batch, first, s_q, s_k, mask);
    let of_last = keys_of(&visible, bounds, batch, last, s_q, s_k, mask);
    let end = of_last.end as u32;
    let begin = of_first.begin as u32 / comptime!(tile as u32);
    let own = first + row + UNIT_POS_X / 4;
    let seen = keys_of(&visible, bounds, batch, own, s_q, s_k, mask);
    let seen_below = keys_of(&visible, bounds, batch, own + 8, s_q, s_k, mask);
    let mut count = 0u32;
    if begin * comptime!(tile as u32) < end {
        count = (end - begin * comptime!(tile as u32)).div_ceil(comptime!(tile as u32));
    }
    let mut sum = zeros(1usize, comptime!(2 * steps(d)));
    let count_of_tile = comptime!(tile / 4);
    let mut index = 0u32;
    // One iteration more than there are tiles: the first only starts a copy.
    while index <= count {
        meet(products);
        if index < count {
            let j = (begin + index) * comptime!(tile as u32);
            let at = comptime!(shape.own()) + (index % 2) as usize * comptime!(shape.stage());
            copy_tile::<F>(k, &of_k, start_k, j, &mut tiles, at, tile, d, units);
            let at = at + comptime!(tile * row_len(d));
            copy_tile::<F>(v, &of_v, start_v, j, &mut tiles, at, tile, d_v, units);
        }
        if index > 0 {
            let done = index - 1;
            let j = (begin + done) * comptime!(tile as u32);
            let at_k = comptime!(shape.own()) + (done % 2) as usize * comptime!(shape.stage());
            let at_v = at_k + comptime!(tile * row_len(d));
            let mut p = multiply_rows::<F>(
                &mma, &tiles, 0usize, at_k, own_rows, 1usize, tile, d, products,
            );
            let mut ds = multiply_rows::<F>(
                &mma, &tiles, at_dout, at_v, own_rows, 1usize, tile, d_v, products,
            );
            // Probabilities are computed while `dO V^T` is in flight.
            settle(&mut p, count_of_tile, 1usize, products);
            cap(&mut p, &of_scores, count_of_tile, capped);
            let under_cap = kept(&p, count_of_tile, capped);
            add_bias(
                &mut p,
                line,
                &of_scores,
                head,
                own,
                j,
                s_q,
                s_k,
                count_of_tile,
                Side::Keys,
                biased,
            );
            // Whether some query of the cube does not see some key of the tile.
            let next = j + comptime!(tile as u32);
            if next as i32 > of_first.end || (j as i32) < of_last.begin {
                hide(
                    &mut p,
                    &seen,
                    &seen_below,
                    j,
                    count_of_tile,
                    mask,
                    Side::Keys,
                );
            }
            #[unroll]
            for at in 0..count_of_tile {
                let mut of_p = p[at];
                #[unroll]
                for side in 0..2usize {
                    let lse = lse_of[comptime!(at % 2)];
                    of_p.insert(side, probability(of_p.extract(side), lse, of_scores.base_2));
                }
                p[at] = of_p;
            }
            settle(&mut ds, count_of_tile, 0usize, products);
            #[unroll]
            for at in 0..count_of_tile {
                let half = comptime!(at % 2);
                let query = own + comptime!(8 * half as u32);
                let key = j + comptime!((at / 2 * 8) as u32) + UNIT_POS_X % 4 * 2;
                let (one, other) = factors_of_keys(&dropout, batch, head, query, key, dropped);
                let mut of_ds = ds[at];
                #[unroll]
                for side in 0..2usize {
                    let of_p = p[at].extract(side);
                    let of_row = gradient(
                        of_p,
                        of_p * comptime![if side == 0 { one } else { other }],
                        of_ds.extract(side),
                        delta_of[half],
                        number(comptime![if capped { &under_cap } else { &p }], at, side),
                        capped,
                    );
                    of_ds.insert(side, of_row);
                }
                ds[at] = of_ds;
            }
            add_columns::<F>(&mma, &ds, &tiles, at_k, &mut sum, 1usize, tile, d, products);
            settle(&mut sum, comptime!(4 * steps(d)), 0usize, products);
        }
        index += 1;
    }

    #[unroll]
    for half in 0..2usize {
        let i = first + row + UNIT_POS_X / 4 + comptime!(8 * half as u32);
        if i < s_q {
            let to = ((i * CUBE_COUNT_Z + batch) * CUBE_COUNT_Y + head) as usize;
            let to = to * comptime!(d / 2);
            write_row::<F>(&sum, of_scores.factor, dq, to, 0usize, half, d);
        }
    }
}

//! The gradient of a bias by distance, before it is summed over pairs of the same distance: a cube
//! has a tile of queries and a tile of keys of one head, and loops over the sequences of the batch.
//!
//! Scores and their gradients are computed a third time, so that this sum too has one order and one
//! owner.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::cube_shape::Backward;
use super::dropped::{Dropout, factors_of_keys};
use super::products::{meet, multiply_rows, settle};
use super::score::{Scale, add_bias, cap, gradient, in_base_2, probability};
use super::tile::{Rows, copy_tile, row_len, zeros};
use super::visible::{Side, Visible, hide, keys_of};

/// Computes the gradients of scores, summed over the batch. Cubes are
/// `[tiles of queries, tiles of keys, hq]`.
///
/// # Shapes
/// As in [`flash_forward`](super::forward::flash_forward); `sums: [hq, s_q, s_k]`.
#[cube(launch_unchecked)]
#[allow(
    clippy::too_many_arguments,
    reason = "these are the kernel's arguments"
)]
pub(in crate::attention) fn flash_backward_bias<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    dout: &[F],
    lse: &[f32],
    delta: &[f32],
    sums: &mut [f32],
    bounds: &[i32],
    line: &[f32],
    of_q: Rows,
    of_k: Rows,
    of_v: Rows,
    of_dout: Rows,
    visible: Visible,
    group: u32,
    sequences: u32,
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
    let shared = comptime!(shape.shared_by_sequences());
    let mut tiles = Shared::<[F]>::new_aligned_slice(shared, 1024usize);

    let head = CUBE_POS_Z;
    let heads = CUBE_COUNT_Z;
    let s_q = of_q.len;
    let s_k = of_k.len;
    let first = CUBE_POS_X * comptime!(own_rows as u32);
    let j = CUBE_POS_Y * comptime!(tile as u32);
    let next = j + comptime!(tile as u32);
    let of_head = (head / group) as usize;
    let last = min(first + comptime!(own_rows as u32), s_q) - 1;
    let own = first + UNIT_POS_Y * 16 + UNIT_POS_X / 4;
    let count_of_tile = comptime!(tile / 4);
    let mut sum = zeros(1usize, comptime!(tile / 8));

    let mut count = sequences;
    if comptime!(!mask.packed) {
        let of_first = keys_of(&visible, bounds, 0u32, first, s_q, s_k, mask);
        let of_last = keys_of(&visible, bounds, 0u32, last, s_q, s_k, mask);
        if of_last.end <= j as i32 || of_first.begin >= next as i32 {
            count = 0u32;
        }
    }
    let mut index = 0u32;
    // One iteration more than there are sequences: the first only starts a copy.
    while index <= count {
        meet(products);
        if index < count {
            let batch = index as usize;
            let at = (index % 2) as usize * comptime!(shape.own() + shape.stage());
            let start = batch * of_q.batch + head as usize * of_q.head;
            copy_tile::<F>(q, &of_q, start, first, &mut tiles, at, own_rows, d, units);
            let at = at + comptime!(own_rows * row_len(d));
            let start = batch * of_dout.batch + head as usize * of_dout.head;
            copy_tile::<F>(
                dout, &of_dout, start, first, &mut tiles, at, own_rows, d_v, units,
            );
            let at = at + comptime!(own_rows * row_len(d_v));
            let start = batch * of_k.batch + of_head * of_k.head;
            copy_tile::<F>(k, &of_k, start, j, &mut tiles, at, tile, d, units);
            let at = at + comptime!(tile * row_len(d));
            let start = batch * of_v.batch + of_head * of_v.head;
            copy_tile::<F>(v, &of_v, start, j, &mut tiles, at, tile, d_v, units);
        }
        if index > 0 {
            let batch = index - 1;
            let at_q = (batch % 2) as usize * comptime!(shape.own() + shape.stage());
            let at_dout = at_q + comptime!(own_rows * row_len(d));
            let at_k = at_q + comptime!(shape.own());
            let at_v = at_k + comptime!(tile * row_len(d));
            let mut p = multiply_rows::<F>(
                &mma, &tiles, at_q, at_k, own_rows, 1usize, tile, d, products,
            );
            let mut ds = multiply_rows::<F>(
                &mma, &tiles, at_dout, at_v, own_rows, 1usize, tile, d_v, products,
            );
            let mut lse_of = Array::<f32>::new(2usize);
            let mut delta_of = Array::<f32>::new(2usize);
            #[unroll]
            for half in 0..2usize {
                let i = own + comptime!(8 * half as u32);
                lse_of[half] = f32::new(f32::INFINITY);
                delta_of[half] = f32::new(0.0);
                if i < s_q {
                    let at = ((batch * heads + head) * s_q + i) as usize;
                    lse_of[half] = in_base_2(lse[at]);
                    delta_of[half] = delta[at];
                }
            }
            settle(&mut p, count_of_tile, 1usize, products);
            cap(&mut p, &of_scores, count_of_tile, capped);
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
            let of_first = keys_of(&visible, bounds, batch, first, s_q, s_k, mask);
            let of_last = keys_of(&visible, bounds, batch, last, s_q, s_k, mask);
            // Whether some query of the cube does not see some key of the tile.
            if next as i32 > of_first.end || (j as i32) < of_last.begin {
                let seen = keys_of(&visible, bounds, batch, own, s_q, s_k, mask);
                let seen_below = keys_of(&visible, bounds, batch, own + 8, s_q, s_k, mask);
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
            settle(&mut ds, count_of_tile, 0usize, products);
            #[unroll]
            for at in 0..count_of_tile {
                let half = comptime!(at % 2);
                let query = own + comptime!(8 * half as u32);
                let key = j + comptime!((at / 2 * 8) as u32) + UNIT_POS_X % 4 * 2;
                let (one, other) = factors_of_keys(&dropout, batch, head, query, key, dropped);
                let mut total = sum[at];
                #[unroll]
                for side in 0..2usize {
                    let of_p = p[at].extract(side);
                    let of_p = probability(of_p, lse_of[half], of_scores.base_2);
                    let of_score = gradient(
                        of_p,
                        of_p * comptime![if side == 0 { one } else { other }],
                        ds[at].extract(side),
                        delta_of[half],
                        f32::new(0.0),
                        false,
                    );
                    total.insert(side, total.extract(side) + of_score);
                }
                sum[at] = total;
            }
        }
        index += 1;
    }

    #[unroll]
    for at in 0..count_of_tile {
        let i = own + comptime!((at % 2 * 8) as u32);
        #[unroll]
        for side in 0..2usize {
            let key = j + comptime!((at / 2 * 8 + side) as u32) + UNIT_POS_X % 4 * 2;
            if i < s_q && key < s_k {
                sums[((head * s_q + i) * s_k + key) as usize] = sum[at].extract(side);
            }
        }
    }
}

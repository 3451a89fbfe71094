//! `softmax(q k^T * scale) v` without scores in memory.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>. A cube has a tile of
//! queries of one head. Each of its planes has 16 or 32 of them, and loops over the tiles of keys
//! with a running row max and row sum. The next pair of tiles is loaded while the current pair is
//! multiplied, and the softmax of the next scores is computed while values are multiplied (Shah et
//! al., FlashAttention-3 (2024), <https://arxiv.org/abs/2407.08608>, its overlap within a
//! warpgroup).

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::cube_shape::Forward;
use super::dropped::Dropout;
use super::products::{add_columns, meet, multiply_rows, settle};
use super::score::Scale;
use super::softmax::{RowPosition, Softmax};
use super::tile::{Pair, Rows, copy_tile, reversed_index, row_len, steps, write_row, zeros};
use super::visible::{Visible, keys_of};

/// Computes `out` and `lse`. Cubes are `[tiles of queries, hq, b]`, with planes of 32 units in x.
///
/// # Shapes
/// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` with any strides,
/// `out: [s_q, b, hq, d_v]`, `lse: [b, hq, s_q]`: the natural logarithm of the sum of exponentials
/// of a row's scaled scores, or minus infinity for a row that sees no key. `bounds` are read if
/// sequences are packed, and `line: [hq, s_q + s_k - 1]` if there is a bias.
#[cube(launch_unchecked)]
#[allow(
    clippy::too_many_arguments,
    reason = "these are the kernel's arguments"
)]
pub(in crate::attention) fn flash_forward<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    out: &mut [Pair<F>],
    lse: &mut [f32],
    bounds: &[i32],
    line: &[f32],
    of_q: Rows,
    of_k: Rows,
    of_v: Rows,
    visible: Visible,
    group: u32,
    of_scores: Scale,
    dropout: Dropout,
    #[comptime] shape: Forward,
    #[define(F)] _dtype: ElemType,
) {
    let Forward {
        d,
        d_v,
        row_blocks,
        keys,
        mask,
        products,
        ..
    } = shape;
    let (queries, units) = comptime!((shape.queries(), shape.units()));
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);

    let head = CUBE_POS_Y;
    let batch = CUBE_POS_Z;
    // With a causal mask the last queries see the most keys; the longest work starts first.
    let first = reversed_index(CUBE_POS_X, CUBE_COUNT_X) * comptime!(queries as u32);
    let s_q = of_q.len;
    let s_k = of_k.len;
    let of_head = (head / group) as usize;
    let start_q = batch as usize * of_q.batch + head as usize * of_q.head;
    let start_k = batch as usize * of_k.batch + of_head * of_k.head;
    let start_v = batch as usize * of_v.batch + of_head * of_v.head;

    let last = min(first + comptime!(queries as u32), s_q) - 1;
    let of_first = keys_of(&visible, bounds, batch, first, s_q, s_k, mask);
    let of_last = keys_of(&visible, bounds, batch, last, s_q, s_k, mask);
    let end = of_last.end as u32;
    let begin = of_first.begin as u32 / comptime!(keys as u32) * comptime!(keys as u32);

    let columns = comptime!(steps(d_v) * 2);
    let num_scores = comptime!(2 * row_blocks * (keys / 8));
    let mut sums = zeros(row_blocks, columns);
    let mut softmax = Softmax::new(row_blocks);
    let query = first + UNIT_POS_Y * comptime!(16 * row_blocks as u32) + UNIT_POS_X / 4;
    let place = RowPosition {
        batch,
        head,
        query,
        s_q,
        s_k,
    };

    let at_k = comptime!(queries * row_len(d)).runtime();
    let at_v = at_k + comptime!(2 * keys * row_len(d));
    let (k_len, v_len) = comptime!((keys * row_len(d), keys * row_len(d_v)));
    copy_tile::<F>(
        q, &of_q, start_q, first, &mut tiles, 0usize, queries, d, units,
    );
    copy_tile::<F>(k, &of_k, start_k, begin, &mut tiles, at_k, keys, d, units);
    if begin < end {
        meet(products);
        let mut next = begin + comptime!(keys as u32);
        let mut slot = 0usize;
        if next < end {
            copy_tile::<F>(
                k,
                &of_k,
                start_k,
                next,
                &mut tiles,
                at_k + k_len,
                keys,
                d,
                units,
            );
        }
        copy_tile::<F>(v, &of_v, start_v, begin, &mut tiles, at_v, keys, d_v, units);
        let mut scores = multiply_rows::<F>(
            &mma, &tiles, 0usize, at_k, queries, row_blocks, keys, d, products,
        );
        settle(&mut scores, num_scores, 0usize, products);
        // Whether some query of the cube does not see some key of the tile.
        let masked = next as i32 > of_first.end || (begin as i32) < of_last.begin;
        softmax.online_update(
            &mut scores,
            &place,
            begin,
            masked,
            &visible,
            bounds,
            line,
            &of_scores,
            &dropout,
            shape,
        );
        while next < end {
            // The next keys and the current values have arrived, and all planes are done with the
            // tiles before.
            meet(products);
            let after = next + comptime!(keys as u32);
            let other = 1 - slot;
            if after < end {
                let to = at_k + slot * k_len;
                copy_tile::<F>(k, &of_k, start_k, after, &mut tiles, to, keys, d, units);
            }
            let to = at_v + other * v_len;
            copy_tile::<F>(v, &of_v, start_v, next, &mut tiles, to, keys, d_v, units);

            // The next softmax is computed while the values are multiplied.
            let of_keys = at_k + other * k_len;
            let mut later = multiply_rows::<F>(
                &mma, &tiles, 0usize, of_keys, queries, row_blocks, keys, d, products,
            );
            let of_values = at_v + slot * v_len;
            add_columns::<F>(
                &mma, &scores, &tiles, of_values, &mut sums, row_blocks, keys, d_v, products,
            );
            settle(&mut later, num_scores, 1usize, products);
            let masked = after as i32 > of_first.end || (next as i32) < of_last.begin;
            softmax.online_update(
                &mut later, &place, next, masked, &visible, bounds, line, &of_scores, &dropout,
                shape,
            );
            settle(
                &mut sums,
                comptime!(2 * row_blocks * columns),
                0usize,
                products,
            );
            softmax.rescale(&mut sums, row_blocks, columns);
            #[unroll]
            for i in 0..num_scores {
                scores[i] = later[i];
            }
            next = after;
            slot = other;
        }
        meet(products);
        let of_values = at_v + slot * v_len;
        add_columns::<F>(
            &mma, &scores, &tiles, of_values, &mut sums, row_blocks, keys, d_v, products,
        );
        settle(
            &mut sums,
            comptime!(2 * row_blocks * columns),
            0usize,
            products,
        );
    }

    let heads = CUBE_COUNT_Y;
    #[unroll]
    for row_block in 0..row_blocks {
        #[unroll]
        for half in 0..2usize {
            let (factor, logarithm) =
                softmax.end(comptime!(2 * row_block + half), of_scores.base_2);
            let i = query + comptime!((16 * row_block + 8 * half) as u32);
            if i < s_q {
                let place = (i * CUBE_COUNT_Z + batch) * heads + head;
                let to = place as usize * comptime!(d_v / 2);
                write_row::<F>(&sums, factor, out, to, row_block, half, d_v);
                let lane = UNIT_POS_X % 4;
                if lane == 0 {
                    lse[((batch * heads + head) * s_q + i) as usize] = logarithm;
                }
            }
        }
    }
}

//! Gradients of queries: a cube has a tile of queries, and the keys that they see come by.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::backward::Backward;
use super::dropped::{Dropout, factors_of_keys};
use super::score::{Scale, cap, in_base_2, probability};
use super::tile::*;
use super::visible::{Side, Visible, keys_of, within};

/// Cubes `[tiles of queries, hq, b]`.
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
    let Backward { d, d_v, tile, mask, capped, dropped, .. } = shape;
    let (own_rows, units) = comptime!((shape.rows(), shape.units()));
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);
    let at_dout = comptime!(own_rows * row_len(d)).runtime();

    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let (s_q, s_k) = (of_q.len, of_k.len);
    // The last queries see the most keys: they go first.
    let first = from_behind(CUBE_POS_X, CUBE_COUNT_X) * comptime!(own_rows as u32);
    let of_head = (head / group) as usize;
    let start_q = batch as usize * of_q.batch + head as usize * of_q.head;
    let start_dout = batch as usize * of_dout.batch + head as usize * of_dout.head;
    let start_k = batch as usize * of_k.batch + of_head * of_k.head;
    let start_v = batch as usize * of_v.batch + of_head * of_v.head;
    copy_tile::<F>(q, &of_q, start_q, first, &mut tiles, 0usize, own_rows, d, units);
    copy_tile::<F>(dout, &of_dout, start_dout, first, &mut tiles, at_dout, own_rows, d_v, units);

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
    let mut index = 0u32;
    // One round more than there are tiles: the first only asks for one.
    while index <= count {
        wait_for_copies();
        sync_cube();
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
            let mut p = multiply_rows::<F>(&mma, &tiles, 0usize, row, at_k, 1usize, tile, d);
            cap(&mut p, &of_scores, comptime!(tile / 4), capped);
            let mut ds = multiply_rows::<F>(&mma, &tiles, at_dout, row, at_v, 1usize, tile, d_v);
            #[unroll]
            for block in 0..comptime!(tile / 8) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(2 * block + half);
                    let span = comptime![if half == 0 { &seen } else { &seen_below }];
                    let (of_p, mut of_ds) = (p[at], ds[at]);
                    let query = own + comptime!(8 * half as u32);
                    let key = j + comptime!((8 * block) as u32) + UNIT_POS_X % 4 * 2;
                    let factors = factors_of_keys(&dropout, batch, head, query, key, dropped);
                    #[unroll]
                    for side in 0..2usize {
                        let column = comptime!((8 * block + side) as u32) + UNIT_POS_X % 4 * 2;
                        let inside = within(span, j + column, mask, Side::Keys);
                        let (_, other) = probability(
                            of_p.extract(side),
                            of_ds.extract(side),
                            lse_of[half],
                            delta_of[half],
                            of_scores.base_2,
                            inside,
                            comptime![if side == 0 { factors.0 } else { factors.1 }],
                            capped,
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
            write_row::<F>(&sum, of_scores.factor, dq, to, 0usize, half, d);
        }
    }
}

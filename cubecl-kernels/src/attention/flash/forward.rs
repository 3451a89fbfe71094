//! `softmax(q k^T * scale) v` without scores in memory.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>. A cube has a tile of
//! queries of one head; each plane has 16 or 32 of them, and walks over the tiles of keys with the
//! running maximum and sum of each row. While a tile of keys is multiplied that of values comes,
//! and the other way round.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::dropped::{Dropout, Dropped, factors_of_keys};
use super::score::{Scale, cap};
use super::tile::*;
use super::visible::{Mask, Side, Visible, keys_of, within};

/// The shape of the work of a cube.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Forward {
    pub(super) d: usize,
    pub(super) d_v: usize,
    /// Planes of a cube.
    pub(super) planes: usize,
    /// Stretches of 16 queries that a plane has.
    pub(super) stretches: usize,
    /// Keys of a tile.
    pub(super) keys: usize,
    pub(super) mask: Mask,
    /// Whether scores are under a cap.
    pub(super) capped: bool,
    pub(super) dropped: Dropped,
}

impl Forward {
    /// Queries of a cube.
    pub(super) fn queries(&self) -> usize {
        self.planes * self.stretches * 16
    }

    fn units(&self) -> usize {
        self.planes * 32
    }

    /// Elements in shared memory.
    pub(super) fn shared(&self) -> usize {
        self.values() + self.keys * row_len(self.d_v)
    }

    /// Where the tile of values lies, behind queries and keys.
    fn values(&self) -> usize {
        (self.queries() + self.keys) * row_len(self.d)
    }
}

/// # Shapes
/// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` wherever they lie, `out:
/// [s_q, b, hq, d_v]`, `lse: [b, hq, s_q]`, the natural logarithm of the sum of exponentials of a
/// row's scaled scores (minus infinity for one that sees no key).
///
/// Cubes `[tiles of queries, hq, b]`; planes of 32 units in x.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are its interface")]
pub(super) fn flash_forward<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    out: &mut [Pair<F>],
    lse: &mut [f32],
    bounds: &[i32],
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
    let Forward { d, d_v, stretches, keys, mask, capped, dropped, .. } = shape;
    let scale = of_scores.base_2;
    let (queries, units) = comptime!((shape.queries(), shape.units()));
    let at_k = comptime!(queries * row_len(d)).runtime();
    let at_v = comptime!(shape.values()).runtime();
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut tiles = Shared::<[F]>::new_aligned_slice(comptime!(shape.shared()), 1024usize);

    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    // The last queries see the most keys: they go first.
    let first = from_behind(CUBE_POS_X, CUBE_COUNT_X) * comptime!(queries as u32);
    let (s_q, s_k) = (of_q.len, of_k.len);
    let of_head = (head / group) as usize;
    let start_q = batch as usize * of_q.batch + head as usize * of_q.head;
    let start_k = batch as usize * of_k.batch + of_head * of_k.head;
    let start_v = batch as usize * of_v.batch + of_head * of_v.head;

    let last = min(first + comptime!(queries as u32), s_q) - 1;
    let of_first = keys_of(&visible, bounds, batch, first, s_q, s_k, mask);
    let of_last = keys_of(&visible, bounds, batch, last, s_q, s_k, mask);
    let end = of_last.end as u32;
    let begin = of_first.begin as u32 / comptime!(keys as u32) * comptime!(keys as u32);

    // The rows of a lane: in each stretch its own and the one eight below.
    let row = UNIT_POS_Y * comptime!(16 * stretches as u32);
    let lane_row = UNIT_POS_X / 4;
    let columns = comptime!(steps(d_v) * 2);
    let tiles_of_keys = comptime!(keys / 8);
    let mut sums = zeros(stretches, columns);
    let mut top = Array::<f32>::new(comptime!(2 * stretches));
    let mut total = Array::<f32>::new(comptime!(2 * stretches));
    #[unroll]
    for i in 0..comptime!(2 * stretches) {
        top[i] = f32::new(f32::NEG_INFINITY);
        total[i] = f32::new(0.0);
    }

    copy_tile::<F>(q, &of_q, start_q, first, &mut tiles, 0usize, queries, d, units);
    copy_tile::<F>(k, &of_k, start_k, begin, &mut tiles, at_k, keys, d, units);
    let mut key = begin;
    while key < end {
        // The keys are there, and nobody reads the last tile's values any more.
        wait_for_copies();
        sync_cube();
        copy_tile::<F>(v, &of_v, start_v, key, &mut tiles, at_v, keys, d_v, units);

        let mut scores = multiply_rows::<F>(&mma, &tiles, 0usize, row, at_k, stretches, keys, d);
        cap(&mut scores, &of_scores, comptime!(2 * stretches * tiles_of_keys), capped);

        // The values are there, and nobody reads these keys any more.
        wait_for_copies();
        sync_cube();
        let next = key + comptime!(keys as u32);
        if next < end {
            copy_tile::<F>(k, &of_k, start_k, next, &mut tiles, at_k, keys, d, units);
        }

        // Whether some query of the cube does not see some key of the tile.
        let masked = next as i32 > of_first.end || (key as i32) < of_last.begin;
        #[unroll]
        for stretch in 0..stretches {
            #[unroll]
            for half in 0..2usize {
                let i = first + row + lane_row + comptime!((16 * stretch + 8 * half) as u32);
                if masked {
                    let seen = keys_of(&visible, bounds, batch, i, s_q, s_k, mask);
                    #[unroll]
                    for tile in 0..tiles_of_keys {
                        let index = comptime!(2 * (stretch * tiles_of_keys + tile) + half);
                        let mut pair = scores[index];
                        #[unroll]
                        for side in 0..2usize {
                            let j = key + comptime!((8 * tile + side) as u32) + UNIT_POS_X % 4 * 2;
                            if !within(&seen, j, mask, Side::Keys) {
                                pair.insert(side, f32::new(f32::NEG_INFINITY));
                            }
                        }
                        scores[index] = pair;
                    }
                }
                let of_row = comptime!(2 * stretch + half);
                let mut highest = top[of_row];
                #[unroll]
                for tile in 0..tiles_of_keys {
                    let pair = scores[comptime!(2 * (stretch * tiles_of_keys + tile) + half)];
                    highest = max(highest, max(pair.extract(0usize), pair.extract(1usize)));
                }
                let highest = max_of_row(highest);
                // A row that has seen no key yet has nothing to be measured from.
                let mut base = highest * scale;
                if highest == f32::new(f32::NEG_INFINITY) {
                    base = f32::new(0.0);
                }
                let shrink = exp2(top[of_row] * scale - base);
                top[of_row] = highest;
                let mut sum = total[of_row] * shrink;
                #[unroll]
                for tile in 0..tiles_of_keys {
                    let index = comptime!(2 * (stretch * tiles_of_keys + tile) + half);
                    let mut pair = scores[index];
                    #[unroll]
                    for side in 0..2usize {
                        let p = exp2(pair.extract(side) * scale - base);
                        sum += p;
                        pair.insert(side, p);
                    }
                    if comptime!(dropped != Dropped::No) {
                        let j = key + comptime!(8 * tile as u32) + UNIT_POS_X % 4 * 2;
                        let (one, other) = factors_of_keys(&dropout, batch, head, i, j, dropped);
                        pair.insert(0usize, pair.extract(0usize) * one);
                        pair.insert(1usize, pair.extract(1usize) * other);
                    }
                    scores[index] = pair;
                }
                total[of_row] = sum;
                #[unroll]
                for column in 0..columns {
                    let index = comptime!(2 * (stretch * columns + column) + half);
                    sums[index] *= Pair::<f32>::new(shrink);
                }
            }
        }
        add_columns::<F>(&mma, &scores, &tiles, at_v, &mut sums, stretches, keys, d_v);
        key = next;
    }
    wait_for_copies();

    let heads = CUBE_COUNT_Y;
    #[unroll]
    for stretch in 0..stretches {
        #[unroll]
        for half in 0..2usize {
            let of_row = comptime!(2 * stretch + half);
            let sum = sum_of_row(total[of_row]);
            let i = first + row + lane_row + comptime!((16 * stretch + 8 * half) as u32);
            if i < s_q {
                let mut factor = f32::new(0.0);
                let mut logarithm = f32::new(f32::NEG_INFINITY);
                if sum > 0.0 {
                    factor = 1.0 / sum;
                    logarithm = top[of_row] * scale * f32::new(core::f32::consts::LN_2) + sum.ln();
                }
                // A NaN is the row's result.
                if sum.is_nan() {
                    factor = sum;
                    logarithm = sum;
                }
                let place = (i * CUBE_COUNT_Z + batch) * heads + head;
                let to = place as usize * comptime!(d_v / 2);
                write_row::<F>(&sums, factor, out, to, stretch, half, d_v);
                let lane = UNIT_POS_X % 4;
                if lane == 0 {
                    lse[((batch * heads + head) * s_q + i) as usize] = logarithm;
                }
            }
        }
    }
}

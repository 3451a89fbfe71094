//! Online softmax: the softmax of rows whose scores arrive one tile at a time.

use cubecl::prelude::*;

use super::cube_shape::Forward;
use super::dropped::{Dropout, Dropped, factors_of_keys};
use super::score::{Scale, bias_of, cap};
use super::tile::{Pair, exp2, reduce_row_max, reduce_row_sum};
use super::visible::{Side, Visible, keys_of, within};

/// The running values of a lane's rows: in each row block of 16, the lane's row and the one eight
/// below.
#[derive(CubeType)]
pub(super) struct Softmax {
    /// The highest score so far.
    row_max: Array<f32>,
    /// This lane's part of the sum of exponentials, relative to the row max.
    row_sum: Array<f32>,
    /// The factor that rescales the earlier sums to the latest row max.
    rescale: Array<f32>,
}

/// The position of a tile of scores.
#[derive(CubeType)]
pub(super) struct RowPosition {
    pub(super) batch: u32,
    pub(super) head: u32,
    /// The lane's query in its first row block.
    pub(super) query: u32,
    pub(super) s_q: u32,
    pub(super) s_k: u32,
}

#[cube]
impl Softmax {
    /// The state of rows that have seen no key.
    pub(super) fn new(#[comptime] row_blocks: usize) -> Self {
        let mut row_max = Array::<f32>::new(comptime!(2 * row_blocks));
        let mut row_sum = Array::<f32>::new(comptime!(2 * row_blocks));
        let mut rescale = Array::<f32>::new(comptime!(2 * row_blocks));
        #[unroll]
        for i in 0..comptime!(2 * row_blocks) {
            row_max[i] = f32::new(f32::NEG_INFINITY);
            row_sum[i] = f32::new(0.0);
            rescale[i] = f32::new(1.0);
        }
        Softmax {
            row_max,
            row_sum,
            rescale,
        }
    }

    /// Turns the products of queries with the keys from `key` on into probabilities relative to the
    /// highest score so far. `masked` says that some row does not see some key.
    #[allow(
        clippy::too_many_arguments,
        reason = "these are the inputs of the softmax update"
    )]
    pub(super) fn online_update(
        &mut self,
        scores: &mut Array<Pair<f32>>,
        place: &RowPosition,
        key: u32,
        masked: bool,
        visible: &Visible,
        bounds: &[i32],
        line: &[f32],
        of_scores: &Scale,
        dropout: &Dropout,
        #[comptime] shape: Forward,
    ) {
        let Forward {
            row_blocks,
            keys,
            mask,
            capped,
            biased,
            dropped,
            ..
        } = shape;
        let tiles = comptime!(keys / 8);
        let scale = of_scores.base_2;
        cap(scores, of_scores, comptime!(2 * row_blocks * tiles), capped);
        #[unroll]
        for row_block in 0..row_blocks {
            #[unroll]
            for half in 0..2usize {
                let i = place.query + comptime!((16 * row_block + 8 * half) as u32);
                let RowPosition {
                    batch,
                    head,
                    s_q,
                    s_k,
                    ..
                } = place;
                if comptime!(biased) {
                    #[unroll]
                    for tile in 0..tiles {
                        let index = comptime!(2 * (row_block * tiles + tile) + half);
                        let mut pair = scores[index];
                        #[unroll]
                        for side in 0..2usize {
                            let j = key + comptime!((8 * tile + side) as u32) + UNIT_POS_X % 4 * 2;
                            let bias = bias_of(line, of_scores, *head, i, j, *s_q, *s_k);
                            pair.insert(side, pair.extract(side) + bias);
                        }
                        scores[index] = pair;
                    }
                }
                if masked {
                    let seen = keys_of(visible, bounds, *batch, i, *s_q, *s_k, mask);
                    #[unroll]
                    for tile in 0..tiles {
                        let index = comptime!(2 * (row_block * tiles + tile) + half);
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
                let of_row = comptime!(2 * row_block + half);
                let mut highest = self.row_max[of_row];
                #[unroll]
                for tile in 0..tiles {
                    let pair = scores[comptime!(2 * (row_block * tiles + tile) + half)];
                    highest = max(highest, max(pair.extract(0usize), pair.extract(1usize)));
                }
                let highest = reduce_row_max(highest);
                // A row that has seen no key yet has no finite row max.
                let mut base = highest * scale;
                if highest == f32::new(f32::NEG_INFINITY) {
                    base = f32::new(0.0);
                }
                let rescale = exp2(self.row_max[of_row] * scale - base);
                let mut sum = self.row_sum[of_row] * rescale;
                self.row_max[of_row] = highest;
                self.rescale[of_row] = rescale;
                #[unroll]
                for tile in 0..tiles {
                    let index = comptime!(2 * (row_block * tiles + tile) + half);
                    let mut pair = scores[index];
                    #[unroll]
                    for side in 0..2usize {
                        let p = exp2(pair.extract(side) * scale - base);
                        sum += p;
                        pair.insert(side, p);
                    }
                    if comptime!(dropped != Dropped::No) {
                        let j = key + comptime!(8 * tile as u32) + UNIT_POS_X % 4 * 2;
                        let (one, other) =
                            factors_of_keys(dropout, place.batch, place.head, i, j, dropped);
                        pair.insert(0usize, pair.extract(0usize) * one);
                        pair.insert(1usize, pair.extract(1usize) * other);
                    }
                    scores[index] = pair;
                }
                self.row_sum[of_row] = sum;
            }
        }
    }

    /// Rescales the sums of all row blocks, `columns` tiles each, to the new row max.
    pub(super) fn rescale(
        &self,
        sums: &mut Array<Pair<f32>>,
        #[comptime] row_blocks: usize,
        #[comptime] columns: usize,
    ) {
        #[unroll]
        for row_block in 0..row_blocks {
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for column in 0..columns {
                    let index = comptime!(2 * (row_block * columns + column) + half);
                    let rescale = self.rescale[comptime!(2 * row_block + half)];
                    sums[index] *= Pair::<f32>::new(rescale);
                }
            }
        }
    }

    /// The factor that normalizes the sums of row `row`, and the row's LSE, which is minus infinity
    /// if the row saw no key. Both are NaN if the row sum is.
    pub(super) fn end(&self, #[comptime] row: usize, scale: f32) -> (f32, f32) {
        let sum = reduce_row_sum(self.row_sum[row]);
        let mut factor = f32::new(0.0);
        let mut logarithm = f32::new(f32::NEG_INFINITY);
        if sum > 0.0 {
            factor = 1.0 / sum;
            logarithm = self.row_max[row] * scale * f32::new(core::f32::consts::LN_2) + sum.ln();
        }
        if sum.is_nan() {
            factor = sum;
            logarithm = sum;
        }
        (factor, logarithm)
    }
}

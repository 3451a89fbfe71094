//! The softmax of rows whose scores come by a tile at a time.

use cubecl::prelude::*;

use super::dropped::{Dropout, Dropped, factors_of_keys};
use super::forward::Forward;
use super::score::{Scale, cap};
use super::tile::{Pair, exp2, reduce_row_max, reduce_row_sum};
use super::visible::{Side, Visible, keys_of, within};

/// The running numbers of the rows of a lane: in each stretch its own and the one eight below.
#[derive(CubeType)]
pub(super) struct Softmax {
    /// The highest score so far.
    row_max: Array<f32>,
    /// This lane's part of the sum of exponentials, measured from it.
    row_sum: Array<f32>,
    /// What the last tile made of the sums before.
    rescale: Array<f32>,
}

/// Where a tile of scores lies.
#[derive(CubeType)]
pub(super) struct RowPosition {
    pub(super) batch: u32,
    pub(super) head: u32,
    /// Of the lane, the first stretch's.
    pub(super) query: u32,
    pub(super) s_q: u32,
    pub(super) s_k: u32,
}

#[cube]
impl Softmax {
    /// Of rows that have seen nothing.
    pub(super) fn new(#[comptime] stretches: usize) -> Self {
        let mut row_max = Array::<f32>::new(comptime!(2 * stretches));
        let mut row_sum = Array::<f32>::new(comptime!(2 * stretches));
        let mut rescale = Array::<f32>::new(comptime!(2 * stretches));
        #[unroll]
        for i in 0..comptime!(2 * stretches) {
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

    /// Makes the products of queries with the keys from `key` on to probabilities, measured from the
    /// highest score until here. `masked`: some row does not see some key.
    #[allow(clippy::too_many_arguments, reason = "what a probability depends on")]
    pub(super) fn online_update(
        &mut self,
        scores: &mut Array<Pair<f32>>,
        place: &RowPosition,
        key: u32,
        masked: bool,
        visible: &Visible,
        bounds: &[i32],
        of_scores: &Scale,
        dropout: &Dropout,
        #[comptime] shape: Forward,
    ) {
        let Forward {
            stretches,
            keys,
            mask,
            capped,
            dropped,
            ..
        } = shape;
        let tiles = comptime!(keys / 8);
        let scale = of_scores.base_2;
        cap(scores, of_scores, comptime!(2 * stretches * tiles), capped);
        #[unroll]
        for stretch in 0..stretches {
            #[unroll]
            for half in 0..2usize {
                let i = place.query + comptime!((16 * stretch + 8 * half) as u32);
                if masked {
                    let RowPosition {
                        batch, s_q, s_k, ..
                    } = place;
                    let seen = keys_of(visible, bounds, *batch, i, *s_q, *s_k, mask);
                    #[unroll]
                    for tile in 0..tiles {
                        let index = comptime!(2 * (stretch * tiles + tile) + half);
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
                let mut highest = self.row_max[of_row];
                #[unroll]
                for tile in 0..tiles {
                    let pair = scores[comptime!(2 * (stretch * tiles + tile) + half)];
                    highest = max(highest, max(pair.extract(0usize), pair.extract(1usize)));
                }
                let highest = reduce_row_max(highest);
                // A row that has seen no key yet has nothing to be measured from.
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
                    let index = comptime!(2 * (stretch * tiles + tile) + half);
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

    /// Measures the sums of `columns` tiles a stretch from the new highest scores.
    pub(super) fn rescale(
        &self,
        sums: &mut Array<Pair<f32>>,
        #[comptime] stretches: usize,
        #[comptime] columns: usize,
    ) {
        #[unroll]
        for stretch in 0..stretches {
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for column in 0..columns {
                    let index = comptime!(2 * (stretch * columns + column) + half);
                    let rescale = self.rescale[comptime!(2 * stretch + half)];
                    sums[index] *= Pair::<f32>::new(rescale);
                }
            }
        }
    }

    /// What makes row `half` of a stretch its result of its sums, and the natural logarithm of its sum of
    /// exponentials; minus infinity where it saw no key. Both are NaN where the sum is.
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

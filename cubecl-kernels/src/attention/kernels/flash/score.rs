//! Scores from products of queries and keys, and probabilities from scores.

use cubecl::prelude::*;

use super::tile::{Pair, exp2};
use super::visible::Side;

/// The factors that turn products into scores.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::attention) struct Scale {
    /// The scale over the soft cap; multiplies products before `tanh`.
    pub(in crate::attention) share: f32,
    /// The scale, or the soft cap if there is one, times `log2(e)`: gives scores to the base 2.
    pub(in crate::attention) base_2: f32,
    /// The scale itself.
    pub(in crate::attention) factor: f32,
    /// The factor that turns a bias of scores into one of products after [`cap`].
    pub(in crate::attention) of_bias: f32,
}

/// Applies `tanh(product * share)` if scores are soft-capped.
#[cube]
pub(super) fn cap(
    products: &mut Array<Pair<f32>>,
    scale: &Scale,
    #[comptime] count: usize,
    #[comptime] capped: bool,
) {
    if comptime!(capped) {
        #[unroll]
        for i in 0..count {
            let mut pair = products[i];
            #[unroll]
            for side in 0..2usize {
                pair.insert(side, tanh(pair.extract(side) * scale.share));
            }
            products[i] = pair;
        }
    }
}

/// The bias of a query and a key, for a product after [`cap`]. The line of a head has `s_q + s_k - 1`
/// numbers; rows past the last are computed too, and read some number of it.
#[cube]
pub(super) fn bias_of(
    line: &[f32],
    scale: &Scale,
    head: u32,
    query: u32,
    key: u32,
    s_q: u32,
    s_k: u32,
) -> f32 {
    let last = (s_q + s_k) as i32 - 2;
    let column = min(max((key + s_q) as i32 - query as i32 - 1, 0i32), last);
    line[(head * (s_q + s_k - 1) + column as u32) as usize] * scale.of_bias
}

/// Adds the bias to products after [`cap`], if there is one. The lane's two rows are `own` and the
/// one eight below, and columns, which are keys or queries, start at `first`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "where the products are, and what is added to them"
)]
pub(super) fn add_bias(
    products: &mut Array<Pair<f32>>,
    line: &[f32],
    scale: &Scale,
    head: u32,
    own: u32,
    first: u32,
    s_q: u32,
    s_k: u32,
    #[comptime] count: usize,
    #[comptime] columns: Side,
    #[comptime] biased: bool,
) {
    if comptime!(biased) {
        #[unroll]
        for at in 0..count {
            let row = own + comptime!((at % 2 * 8) as u32);
            let mut pair = products[at];
            #[unroll]
            for side in 0..2usize {
                let column = first + comptime!((at / 2 * 8 + side) as u32) + UNIT_POS_X % 4 * 2;
                let mut query = row;
                let mut key = column;
                if comptime!(columns == Side::Queries) {
                    query = column;
                    key = row;
                }
                let bias = bias_of(line, scale, head, query, key, s_q, s_k);
                pair.insert(side, pair.extract(side) + bias);
            }
            products[at] = pair;
        }
    }
}

/// `tanh` to about 1e-7; the instruction `tanh.approx` has errors of 5e-4.
#[cube]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp2(x * f32::new(2.0 * core::f32::consts::LOG2_E)) + 1.0)
}

/// Converts a row's LSE to the base 2; plus infinity for a row without keys, which makes all of its
/// probabilities zero.
#[cube]
pub(super) fn in_base_2(lse: f32) -> f32 {
    let mut found = lse * f32::new(core::f32::consts::LOG2_E);
    if lse == f32::new(f32::NEG_INFINITY) {
        found = f32::new(f32::INFINITY);
    }
    found
}

/// The probability of an element, from its product after [`cap`]. The product is minus infinity for
/// a masked key.
#[cube]
pub(super) fn probability(product: f32, lse: f32, base_2: f32) -> f32 {
    exp2(product * base_2 - lse)
}

/// `dS` of an element, from its probability, the probability after dropout, `dO V^T` and the
/// product after [`cap`], which is only read if scores are capped.
#[cube]
pub(super) fn gradient(
    p: f32,
    dropped: f32,
    dp: f32,
    delta: f32,
    product: f32,
    #[comptime] capped: bool,
) -> f32 {
    let mut ds = dropped * dp - p * delta;
    if comptime!(capped) {
        ds *= 1.0 - product * product;
    }
    ds
}

/// A copy of the products if `asked`, otherwise an empty array.
#[cube]
pub(super) fn kept(
    products: &Array<Pair<f32>>,
    #[comptime] count: usize,
    #[comptime] asked: bool,
) -> Array<Pair<f32>> {
    let mut copy = Array::<Pair<f32>>::new(comptime!(if asked { count } else { 0 }));
    if comptime!(asked) {
        #[unroll]
        for i in 0..count {
            copy[i] = products[i];
        }
    }
    copy
}

/// One number of a pair.
#[cube]
pub(super) fn number(
    pairs: &Array<Pair<f32>>,
    #[comptime] at: usize,
    #[comptime] side: usize,
) -> f32 {
    pairs[at].extract(side)
}

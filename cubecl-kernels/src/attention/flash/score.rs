//! From products of queries and keys to scores, and how a probability comes of one.

use cubecl::prelude::*;

use super::AttentionOptions;
use super::tile::{Pair, exp2};

/// What makes a score of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Scale {
    /// Of products under a cap: the factor over the cap.
    pub(super) share: f32,
    /// What makes a score to the base 2: the factor, or the cap, times `log2(e)`.
    pub(super) base_2: f32,
    /// The factor itself.
    pub(super) factor: f32,
}

impl Scale {
    pub(super) fn launch_arg(options: &AttentionOptions, d: usize) -> ScaleLaunch {
        let factor = options.factor(d);
        let (share, base_2) = Self::numbers(options, d);
        ScaleLaunch::new(share, base_2, factor as f32)
    }

    /// Whether the numbers are such that kernels can compute with them.
    pub(super) fn fits(options: &AttentionOptions, d: usize) -> bool {
        let (share, base_2) = Self::numbers(options, d);
        let factor = options.factor(d) as f32;
        [factor, share, base_2]
            .iter()
            .all(|number| number.is_normal() && *number > 0.0)
    }

    fn numbers(options: &AttentionOptions, d: usize) -> (f32, f32) {
        let factor = options.factor(d);
        let cap = options.soft_cap.unwrap_or(factor);
        (
            (factor / cap) as f32,
            (cap * std::f64::consts::LOG2_E) as f32,
        )
    }
}

/// `tanh` of each product's share of the cap, where there is one.
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

/// To about 1e-7; the one instruction there is for it has errors of 5e-4.
#[cube]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp2(x * f32::new(2.0 * core::f32::consts::LOG2_E)) + 1.0)
}

/// A row's `log2` of the sum of exponentials, plus infinity for a row without a key: no probability
/// of it is other than zero.
#[cube]
pub(super) fn in_base_2(lse: f32) -> f32 {
    let mut found = lse * f32::new(core::f32::consts::LOG2_E);
    if lse == f32::new(f32::NEG_INFINITY) {
        found = f32::new(f32::INFINITY);
    }
    found
}

/// The probability of one element, from the product under its [`cap`]; minus infinity where it is not
/// seen.
#[cube]
pub(super) fn probability(product: f32, lse: f32, base_2: f32) -> f32 {
    exp2(product * base_2 - lse)
}

/// `dS` of one element, from its probability, what dropout made of that, `dO V^T` and the product under
/// its [`cap`], which is read where there is one.
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

/// A copy where one is asked for, otherwise nothing.
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

/// One of a pair's numbers.
#[cube]
pub(super) fn number(
    pairs: &Array<Pair<f32>>,
    #[comptime] at: usize,
    #[comptime] side: usize,
) -> f32 {
    pairs[at].extract(side)
}

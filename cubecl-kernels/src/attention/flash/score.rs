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
        [factor, share, base_2].iter().all(|number| number.is_normal() && *number > 0.0)
    }

    fn numbers(options: &AttentionOptions, d: usize) -> (f32, f32) {
        let factor = options.factor(d);
        let cap = options.soft_cap.unwrap_or(factor);
        ((factor / cap) as f32, (cap * std::f64::consts::LOG2_E) as f32)
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

/// `P` and `dS` of one element, from the product under its [`cap`], `dO V^T` and what dropout
/// multiplies the probability with.
#[cube]
#[allow(clippy::too_many_arguments, reason = "what a probability depends on")]
pub(super) fn probability(
    product: f32,
    dp: f32,
    lse: f32,
    delta: f32,
    base_2: f32,
    seen: bool,
    factor: f32,
    #[comptime] capped: bool,
) -> (f32, f32) {
    let mut p = exp2(product * base_2 - lse);
    if !seen {
        p = f32::new(0.0);
    }
    let mut ds = p * (dp * factor - delta);
    if comptime!(capped) {
        ds *= 1.0 - product * product;
    }
    (p * factor, ds)
}

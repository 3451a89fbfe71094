//! The kernel of the router losses, with the layout of [`moe::kernels`](crate::moe::kernels).

use cubecl::prelude::*;

use super::NUM_VALUES;
use crate::moe::kernels::{PLANE, TINY, number};

/// The compile-time parameters of the losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) experts: u32,
    /// Whether scores come from a softmax instead of a sigmoid.
    pub(super) softmax: bool,
    /// Which load-balancing losses exist: for the micro-batch, for sequences, for a global batch.
    pub(super) balance: [bool; 3],
    pub(super) z_loss: bool,
    /// Whether a loss mask excludes some tokens.
    pub(super) masked: bool,
}

/// Sizes, strides and factors of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Numbers {
    pub(super) tokens: u32,
    pub(super) logits_stride: u32,
    pub(super) scores_stride: u32,
    pub(super) sequences: u32,
    pub(super) micro_batch: f32,
    pub(super) of_sequences: f32,
    pub(super) global_batch: f32,
    pub(super) z_loss: f32,
}

/// Adds the gradient of a load-balancing loss to the `weights` of the probabilities, and returns
/// its value. The loss's counts start at index `row` of `counts`.
#[cube]
fn add_balance(
    counts: &[f32],
    row: usize,
    factor: f32,
    probabilities: &Array<f32>,
    weights: &mut Array<f32>,
    #[comptime] experts: u32,
) -> f32 {
    let held = comptime!((experts as usize).div_ceil(PLANE));
    let mut own = Array::<f32>::new(held);
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..held {
        own[i] = f32::new(0.0);
        if number(i) < experts {
            own[i] = counts[row + number(i) as usize];
            sum += own[i];
        }
    }
    let scale = comptime!(experts as f32) / max(plane_sum(sum), f32::new(1.0));
    let mut value = f32::new(0.0);
    #[unroll]
    for i in 0..held {
        let share = own[i] * scale;
        value += share * probabilities[i];
        weights[i] += share * factor;
    }
    plane_sum(value)
}

/// Writes `[tokens, 3 + experts]` to `values`: a token's terms of the three losses, then its
/// probabilities.
#[cube(launch)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per operand and per size"
)]
pub(super) fn losses_kernel(
    logits: &[f32],
    scores: &[f32],
    counted: &[f32],
    micro_batch: &[f32],
    of_sequences: &[f32],
    global_batch: &[f32],
    of_scores: &mut [f32],
    of_logits: &mut [f32],
    values: &mut [f32],
    numbers: Numbers,
    #[comptime] plan: Plan,
) {
    let experts = comptime!(plan.experts);
    let held = comptime!((experts as usize).div_ceil(PLANE));
    let token = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;
    if token < numbers.tokens {
        let mut counts = f32::new(1.0);
        if comptime!(plan.masked) {
            counts = counted[token as usize];
        }
        let mut probabilities = Array::<f32>::new(held);
        let mut weights = Array::<f32>::new(held);
        let mut sum = f32::new(0.0);
        #[unroll]
        for i in 0..held {
            probabilities[i] = f32::new(0.0);
            weights[i] = f32::new(0.0);
            if number(i) < experts {
                let at = token as usize * numbers.scores_stride as usize + number(i) as usize;
                probabilities[i] = scores[at];
                sum += probabilities[i];
            }
        }
        if comptime!(!plan.softmax) {
            sum = plane_sum(sum) + TINY;
            #[unroll]
            for i in 0..held {
                probabilities[i] /= sum;
            }
        }
        let row = token as usize * comptime!(experts as usize + NUM_VALUES);
        let mut terms = Array::<f32>::new(2usize);
        terms[0] = f32::new(0.0);
        terms[1] = f32::new(0.0);
        if comptime!(plan.balance[0]) {
            let factor = numbers.micro_batch;
            terms[0] = add_balance(
                micro_batch,
                0usize,
                factor,
                &probabilities,
                &mut weights,
                experts,
            );
        }
        if comptime!(plan.balance[1]) {
            let factor = numbers.of_sequences;
            let sequence = token % numbers.sequences;
            let from = sequence as usize * experts as usize;
            terms[1] = add_balance(
                of_sequences,
                from,
                factor,
                &probabilities,
                &mut weights,
                experts,
            );
        }
        if comptime!(plan.balance[2]) {
            let factor = numbers.global_batch;
            add_balance(
                global_batch,
                0usize,
                factor,
                &probabilities,
                &mut weights,
                experts,
            );
        }
        if comptime!(plan.balance[0] || plan.balance[1] || plan.balance[2]) {
            let mut mean = f32::new(0.0);
            if comptime!(!plan.softmax) {
                #[unroll]
                for i in 0..held {
                    mean += weights[i] * probabilities[i];
                }
                mean = plane_sum(mean);
            } else {
                sum = f32::new(1.0);
            }
            #[unroll]
            for i in 0..held {
                if number(i) < experts {
                    let at = token as usize * experts as usize + number(i) as usize;
                    of_scores[at] = counts * (weights[i] - mean) / sum;
                }
            }
        }
        let mut square = f32::new(0.0);
        if comptime!(plan.z_loss) {
            let from = token as usize * numbers.logits_stride as usize;
            let mut own = Array::<f32>::new(held);
            let mut top = f32::new(f32::NEG_INFINITY);
            #[unroll]
            for i in 0..held {
                own[i] = f32::new(f32::NEG_INFINITY);
                if number(i) < experts {
                    own[i] = logits[from + number(i) as usize];
                    top = max(top, own[i]);
                }
            }
            let top = plane_max(top);
            let mut sum = f32::new(0.0);
            #[unroll]
            for i in 0..held {
                own[i] = (own[i] - top).exp();
                sum += own[i];
            }
            let sum = plane_sum(sum);
            let lse = sum.ln() + top;
            square = lse * lse;
            #[unroll]
            for i in 0..held {
                if number(i) < experts {
                    let at = token as usize * experts as usize + number(i) as usize;
                    of_logits[at] = counts * numbers.z_loss * 2.0 * lse * own[i] / sum;
                }
            }
        }
        if UNIT_POS_X == 0 {
            values[row] = counts * terms[0];
            values[row + 1] = counts * terms[1];
            values[row + 2] = counts * square;
        }
        #[unroll]
        for i in 0..held {
            if number(i) < experts {
                let at = row + comptime!(NUM_VALUES) + number(i) as usize;
                values[at] = counts * probabilities[i];
            }
        }
    }
}

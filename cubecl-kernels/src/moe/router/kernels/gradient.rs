//! The kernel of the gradient of the logits; [`fallback`](super::super::fallback) has the formula.

use cubecl::prelude::*;

use super::{Plan, TINY, number};

/// `has` says whether gradients of the scores, and of the logits, are to be added.
#[cube(launch)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per operand and per size"
)]
pub(in crate::moe::router) fn gradient_kernel(
    dweights: &[f32],
    scores: &[f32],
    experts: &[i32],
    of_scores: &[f32],
    of_logits: &[f32],
    dlogits: &mut [f32],
    tokens: u32,
    scores_stride: u32,
    logits_stride: u32,
    scale: f32,
    #[comptime] has: [bool; 2],
    #[comptime] plan: Plan,
) {
    let held = comptime!(plan.held());
    let token = (CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y) as usize;
    if token < tokens as usize {
        let row = token * plan.experts as usize;
        let choices = token * plan.top_k as usize;
        let mut values = Array::<f32>::new(held);
        let mut ds = Array::<f32>::new(held);
        #[unroll]
        for i in 0..held {
            values[i] = f32::new(0.0);
            ds[i] = f32::new(0.0);
            if number(i) < plan.experts {
                values[i] = scores[row + number(i) as usize];
                if comptime!(has[0]) {
                    ds[i] = of_scores[token * scores_stride as usize + number(i) as usize];
                }
            }
        }
        let mut sum = f32::new(1.0);
        let mut mean = f32::new(0.0);
        if comptime!(plan.normalise) {
            sum = f32::new(TINY);
            for choice in 0..plan.top_k {
                let at = choices + choice as usize;
                let value = scores[row + usize::cast_from(experts[at])];
                sum += value;
                mean += dweights[at] * scale * value;
            }
            mean /= sum;
        }
        for choice in 0..plan.top_k {
            let at = choices + choice as usize;
            let expert = u32::cast_from(experts[at]);
            let of_chosen = (dweights[at] * scale - mean) / sum;
            #[unroll]
            for i in 0..held {
                if number(i) == expert {
                    ds[i] += of_chosen;
                }
            }
        }
        let mut mean = f32::new(0.0);
        if comptime!(plan.softmax) {
            #[unroll]
            for i in 0..held {
                mean += values[i] * ds[i];
            }
            mean = plane_sum(mean);
        }
        #[unroll]
        for i in 0..held {
            if number(i) < plan.experts {
                let mut dx = values[i] * (ds[i] - mean);
                if comptime!(!plan.softmax) {
                    dx *= 1.0 - values[i];
                }
                if comptime!(has[1]) {
                    dx += of_logits[token * logits_stride as usize + number(i) as usize];
                }
                dlogits[row + number(i) as usize] = dx;
            }
        }
    }
}

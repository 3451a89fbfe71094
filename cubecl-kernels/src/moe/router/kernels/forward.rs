//! The kernel that chooses experts.

use cubecl::prelude::*;

use super::{ChoiceOf, Plan, TINY, number};

/// Marks "no expert".
const NONE: u32 = u32::MAX;

/// Sets one bit per expert index below `len` that this lane holds.
#[cube]
fn all(len: u32, #[comptime] held: usize) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..held {
        if number(i) < len {
            bits |= comptime!(1u32 << i);
        }
    }
    bits
}

/// Clears the bit of index `number` if this lane holds it.
#[cube]
fn without(bits: u32, number: u32) -> u32 {
    let mut left = bits;
    if number % 32 == UNIT_POS_X {
        left = bits & !(1u32 << (number / 32));
    }
    left
}

/// Returns the best of the values whose bit is set, and its index; the lowest index wins ties. No
/// value may be NaN.
#[cube]
fn best(values: &Array<f32>, bits: u32, #[comptime] held: usize) -> (f32, u32) {
    let mut value = f32::new(f32::NEG_INFINITY);
    let mut found = NONE.runtime();
    #[unroll]
    for i in 0..held {
        let is_better = found == NONE || values[i] > value;
        if bits & comptime!(1u32 << i) != 0 && is_better {
            value = values[i];
            found = number(i);
        }
    }
    let top = plane_max(value);
    if value < top {
        found = NONE;
    }
    (top, plane_min(found))
}

/// Replaces NaN by negative infinity, the worst score.
#[cube]
fn ranked(score: f32) -> f32 {
    let mut ranked = score;
    if score.is_nan() {
        ranked = f32::new(f32::NEG_INFINITY);
    }
    ranked
}

/// Turns logits into scores, in place. Each score ends in a division, so that a later addition
/// cannot be fused into an unrounded multiply-add.
#[cube]
fn score(values: &mut Array<f32>, #[comptime] plan: Plan) {
    if comptime!(plan.softmax) {
        let mut top = f32::new(f32::NEG_INFINITY);
        #[unroll]
        for i in 0..comptime!(plan.held()) {
            if number(i) < plan.experts {
                top = max(top, values[i]);
            }
        }
        let top = plane_max(top);
        let mut sum = f32::new(0.0);
        #[unroll]
        for i in 0..comptime!(plan.held()) {
            if number(i) < plan.experts {
                values[i] = (values[i] - top).exp();
                sum += values[i];
            }
        }
        let sum = plane_sum(sum);
        #[unroll]
        for i in 0..comptime!(plan.held()) {
            values[i] /= sum;
        }
    } else {
        #[unroll]
        for i in 0..comptime!(plan.held()) {
            values[i] = 1.0 / (1.0 + (-values[i]).exp());
        }
    }
}

/// Sets one bit per expert of this lane that is in one of the groups that are kept.
#[cube]
fn kept(values: &Array<f32>, open: u32, #[comptime] plan: Plan) -> u32 {
    let held = comptime!(plan.held());
    let of_group = comptime!(plan.of_group());
    let num = comptime!(plan.groups()[0]);
    let num_kept = comptime!(plan.groups()[1]);
    let num_best = comptime!(plan.groups()[2]);
    // Group `32 i + lane` is in register `i` of the lane.
    let mut sums = Array::<f32>::new(held);
    #[unroll]
    for i in 0..held {
        sums[i] = f32::new(0.0);
    }
    for group in 0..num {
        let mut bits = 0u32;
        #[unroll]
        for i in 0..held {
            if number(i) / of_group == group {
                bits |= comptime!(1u32 << i);
            }
        }
        bits &= open;
        let mut sum = f32::new(0.0);
        for _ in 0..num_best {
            let (value, expert) = best(values, bits, held);
            sum += value;
            bits = without(bits, expert);
        }
        #[unroll]
        for i in 0..held {
            if number(i) == group {
                sums[i] = ranked(sum);
            }
        }
    }
    let mut left = all(num, held);
    let mut bits = 0u32;
    for _ in 0..num_kept {
        let (_sum, group) = best(&sums, left, held);
        left = without(left, group);
        #[unroll]
        for i in 0..held {
            if number(i) / of_group == group {
                bits |= comptime!(1u32 << i);
            }
        }
    }
    bits & open
}

#[cube(launch)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per result and per size"
)]
pub(in crate::moe::router) fn route_kernel(
    logits: &[f32],
    bias: &[f32],
    given: &[i32],
    scores: &mut [f32],
    experts: &mut [i32],
    weights: &mut [f32],
    tokens: u32,
    stride: u32,
    scale: f32,
    #[comptime] choice_of: ChoiceOf,
    #[comptime] plan: Plan,
) {
    let held = comptime!(plan.held());
    let token = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;
    if token < tokens {
        let mut values = Array::<f32>::new(held);
        #[unroll]
        for i in 0..held {
            values[i] = f32::new(0.0);
            if number(i) < plan.experts {
                values[i] = logits[token as usize * stride as usize + number(i) as usize];
            }
        }
        score(&mut values, plan);
        let mut by = Array::<f32>::new(held);
        #[unroll]
        for i in 0..held {
            let mut value = values[i];
            if number(i) < plan.experts {
                scores[token as usize * plan.experts as usize + number(i) as usize] = value;
                if comptime!(choice_of == ChoiceOf::Biased) {
                    value += bias[number(i) as usize];
                }
            }
            by[i] = ranked(value);
        }
        let mut open = all(plan.experts, held);
        if comptime!(plan.groups.is_some() && choice_of != ChoiceOf::Others) {
            open = kept(&by, open, plan);
        }
        // Choice `32 i + lane` is in register `i` of the lane.
        let mut own = Array::<f32>::new(comptime!(plan.picked()));
        let mut numbers = Array::<u32>::new(comptime!(plan.picked()));
        let mut sum = f32::new(0.0);
        for choice in 0..plan.top_k {
            let expert = if comptime!(choice_of == ChoiceOf::Others) {
                let at = token as usize * plan.top_k as usize + choice as usize;
                u32::cast_from(given[at])
            } else {
                let (_value, found) = best(&by, open, held);
                found
            };
            open = without(open, expert);
            let mut value = f32::new(0.0);
            #[unroll]
            for i in 0..held {
                if comptime!(i as u32) == expert / 32 {
                    value = values[i];
                }
            }
            let value = plane_shuffle(value, expert % 32);
            sum += value;
            #[unroll]
            for i in 0..comptime!(plan.picked()) {
                if number(i) == choice {
                    own[i] = value;
                    numbers[i] = expert;
                }
            }
        }
        #[unroll]
        for i in 0..comptime!(plan.picked()) {
            if number(i) < plan.top_k {
                let at = token as usize * plan.top_k as usize + number(i) as usize;
                let mut weight = own[i];
                if comptime!(plan.normalise) {
                    weight /= sum + TINY;
                }
                weights[at] = weight * scale;
                experts[at] = i32::cast_from(numbers[i]);
            }
        }
    }
}

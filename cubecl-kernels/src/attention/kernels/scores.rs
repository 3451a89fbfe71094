//! The softmax between the products: each row has a plane of 32 units. Forward reads the scores from
//! device memory once; backward reads the probabilities and their gradient once.

use cubecl::prelude::*;

/// Softmax over the visible keys. `first` is the position of the first query, counted from the
/// first key; it may be negative.
#[cube(launch)]
pub(in crate::attention) fn softmax_kernel<F: Float>(
    scores: &[f32],
    out: &mut [F],
    rows: u32,
    columns: u32,
    queries: u32,
    first: i32,
    window: i32,
    #[comptime] causal: bool,
    #[comptime] windowed: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * 8 + UNIT_POS_Y;
    if row < rows {
        let position = first + i32::cast_from(row % queries);
        let mut start = 0i32;
        if windowed {
            start = max(position + 1 - window, 0i32);
        }
        let mut end = i32::cast_from(columns);
        if causal {
            end = min(position + 1, end);
        }
        let base = row as usize * columns as usize;
        let mut top = f32::new(-3.0e38);
        let mut at = start + i32::cast_from(UNIT_POS_X);
        while at < end {
            top = max(top, scores[base + usize::cast_from(at)]);
            at += 32i32;
        }
        let top = plane_max(top);
        let mut sum = f32::new(0.0);
        let mut at = start + i32::cast_from(UNIT_POS_X);
        while at < end {
            sum += (scores[base + usize::cast_from(at)] - top).exp();
            at += 32i32;
        }
        let sum = plane_sum(sum);
        // A query without keys has no sum; its probabilities are 0.
        let mut scale = f32::new(0.0);
        if start < end {
            scale = 1.0 / sum;
        }
        let mut column = UNIT_POS_X;
        while column < columns {
            let at = i32::cast_from(column);
            let index = base + column as usize;
            let mut p = f32::new(0.0);
            if at >= start && at < end {
                p = (scores[index] - top).exp() * scale;
            }
            out[index] = F::cast_from(p);
            column += 32;
        }
    }
}

#[cube(launch)]
pub(in crate::attention) fn gradient_kernel<F: Float>(
    p: &[F],
    dp: &[f32],
    out: &mut [F],
    rows: u32,
    columns: u32,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * 8 + UNIT_POS_Y;
    if row < rows {
        let base = row as usize * columns as usize;
        let mut sum = f32::new(0.0);
        let mut column = UNIT_POS_X;
        while column < columns {
            let index = base + column as usize;
            sum += f32::cast_from(p[index]) * dp[index];
            column += 32;
        }
        let sum = plane_sum(sum);
        let mut column = UNIT_POS_X;
        while column < columns {
            let index = base + column as usize;
            out[index] = F::cast_from(f32::cast_from(p[index]) * (dp[index] - sum));
            column += 32;
        }
    }
}

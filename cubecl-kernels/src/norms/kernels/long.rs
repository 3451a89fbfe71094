//! Kernels for rows that do not fit in registers: each pass reads them from memory.

use cubecl::prelude::*;

use super::{BackwardSizes, ForwardSizes, NormVariant};
use crate::kernel_parts::{RowGroup, place, row_sum, row_sums};

/// Like [`forward_kernel`](super::forward_kernel).
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn long_forward_kernel<F: Float, G: Float, H: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    gamma: &[Vector<G, N>],
    beta: &[Vector<H, N>],
    y: &mut [Vector<F, N>],
    sum: &mut [Vector<F, N>],
    mean: &mut [f32],
    inverse: &mut [f32],
    sizes: ForwardSizes,
    #[comptime] team: RowGroup,
    #[comptime] flavor: NormVariant,
    #[define(F, G, H)] _dtypes: [ElemType; 3],
) {
    let mut shared = Shared::new_slice(64usize);
    let units = comptime!(team.planes * 32);
    let (unit, row) = place(team);
    if row < sizes.rows {
        let from = row as usize * sizes.x_stride as usize;
        let to = row as usize * sizes.width as usize;
        if comptime!(flavor.add) {
            let other = row as usize * sizes.residual_stride as usize;
            let mut at = unit;
            while at < sizes.width {
                let value = Vector::<f32, N>::cast_from(x[from + at as usize]);
                let other = Vector::<f32, N>::cast_from(residual[other + at as usize]);
                sum[to + at as usize] = Vector::cast_from(value + other);
                at += units;
            }
        }
        let mut average = f32::new(0.0);
        if comptime!(flavor.centered) {
            let mut total = Vector::<f32, N>::new(0.0);
            let mut at = unit;
            while at < sizes.width {
                if comptime!(flavor.add) {
                    total += Vector::cast_from(sum[to + at as usize]);
                } else {
                    total += Vector::cast_from(x[from + at as usize]);
                }
                at += units;
            }
            average =
                row_sum(Vector::vector_sum(total), &mut shared, 32u32, team.planes) / sizes.len;
        }
        let mut squares = Vector::<f32, N>::new(0.0);
        let mut at = unit;
        while at < sizes.width {
            let value = if comptime!(flavor.add) {
                sum[to + at as usize]
            } else {
                x[from + at as usize]
            };
            let value = Vector::<f32, N>::cast_from(value) - Vector::new(average);
            squares += value * value;
            at += units;
        }
        let squares = row_sum(Vector::vector_sum(squares), &mut shared, 0u32, team.planes);
        let scale = (squares / sizes.len + sizes.epsilon).inverse_sqrt();
        if unit == 0 {
            inverse[row as usize] = scale;
            if comptime!(flavor.centered) {
                mean[row as usize] = average;
            }
        }
        let mut at = unit;
        while at < sizes.width {
            let value = if comptime!(flavor.add) {
                sum[to + at as usize]
            } else {
                x[from + at as usize]
            };
            let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
            if comptime!(flavor.zero_centered_gamma) {
                factor += Vector::new(1.0);
            }
            let value = Vector::<f32, N>::cast_from(value) - Vector::new(average);
            let mut value = value * Vector::new(scale) * factor;
            if comptime!(flavor.beta) {
                value += Vector::cast_from(beta[at as usize]);
            }
            y[to + at as usize] = Vector::cast_from(value);
            at += units;
        }
    }
}

/// Like [`backward_kernel`](super::backward_kernel), with the partial sums in memory, which must be
/// zeros initially. Each unit reads and writes only its own elements.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn long_backward_kernel<F: Float, G: Float, N: Size>(
    dy: &[Vector<F, N>],
    x: &[Vector<F, N>],
    dsum: &[Vector<F, N>],
    gamma: &[Vector<G, N>],
    mean: &[f32],
    inverse: &[f32],
    dx: &mut [Vector<F, N>],
    dgamma: &mut [Vector<f32, N>],
    dbeta: &mut [Vector<f32, N>],
    sizes: BackwardSizes,
    #[comptime] team: RowGroup,
    #[comptime] flavor: NormVariant,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::new_slice(128usize);
    let units = comptime!(team.planes * 32);
    let (unit, worker) = place(team);
    let parts = worker as usize * sizes.width as usize;
    let mut at = unit;
    while at < sizes.width {
        dgamma[parts + at as usize] = Vector::new(0.0);
        if comptime!(flavor.beta) {
            dbeta[parts + at as usize] = Vector::new(0.0);
        }
        at += units;
    }
    let mut row = worker;
    let mut turn = 0u32;
    while row < sizes.rows {
        let scale = inverse[row as usize];
        let mut average = f32::new(0.0);
        if comptime!(flavor.centered) {
            average = mean[row as usize];
        }
        let from_x = row as usize * sizes.x_stride as usize;
        let from_dy = row as usize * sizes.dy_stride as usize;
        let mut sum_g = Vector::<f32, N>::new(0.0);
        let mut sum_gn = Vector::<f32, N>::new(0.0);
        let mut at = unit;
        while at < sizes.width {
            let dy = Vector::<f32, N>::cast_from(dy[from_dy + at as usize]);
            let n = Vector::<f32, N>::cast_from(x[from_x + at as usize]) - Vector::new(average);
            let dy_n = dy * (n * Vector::new(scale));
            let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
            if comptime!(flavor.zero_centered_gamma) {
                factor += Vector::new(1.0);
            }
            dgamma[parts + at as usize] += dy_n;
            if comptime!(flavor.beta) {
                dbeta[parts + at as usize] += dy;
            }
            sum_g += dy * factor;
            sum_gn += dy_n * factor;
            at += units;
        }
        let (sum_g, sum_gn) = row_sums(
            Vector::vector_sum(sum_g),
            Vector::vector_sum(sum_gn),
            &mut shared,
            turn * 64,
            team.planes,
        );
        let mean_gn = sum_gn / sizes.len;
        let mut mean_g = f32::new(0.0);
        if comptime!(flavor.centered) {
            mean_g = sum_g / sizes.len;
        }
        let mut at = unit;
        while at < sizes.width {
            let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
            if comptime!(flavor.zero_centered_gamma) {
                factor += Vector::new(1.0);
            }
            let g = Vector::<f32, N>::cast_from(dy[from_dy + at as usize]) * factor;
            let n = Vector::<f32, N>::cast_from(x[from_x + at as usize]) - Vector::new(average);
            let n = n * Vector::new(scale);
            let inner = g - Vector::new(mean_g) - n * Vector::new(mean_gn);
            let mut value = inner * Vector::new(scale);
            if comptime!(flavor.add) {
                let from = row as usize * sizes.dsum_stride as usize;
                value += Vector::cast_from(dsum[from + at as usize]);
            }
            dx[row as usize * sizes.width as usize + at as usize] = Vector::cast_from(value);
            at += units;
        }
        row += sizes.teams;
        turn = 1 - turn;
    }
}

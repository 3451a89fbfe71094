//! Kernels for rows that do not fit in registers: each pass reads them from memory. The formulas of
//! the backward pass are those of `backward.rs`.

use cubecl::prelude::*;

use super::{BackwardSizes, ForwardSizes, NormVariant};
use crate::kernel_parts::{RowGroup, magnitude, raise, row_sum, row_sums, unit_and_row};

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
    rstd: &mut [f32],
    amax: &mut [Atomic<u32>],
    sizes: ForwardSizes,
    #[comptime] group: RowGroup,
    #[comptime] variant: NormVariant,
    #[define(F, G, H)] _dtypes: [ElemType; 3],
) {
    let mut shared = Shared::new_slice(64usize);
    let units = comptime!(group.planes * 32);
    let (unit, row) = unit_and_row(group);
    let mut largest = u32::new(0);
    if row < sizes.rows {
        let from = row as usize * sizes.x_stride as usize;
        let to = row as usize * sizes.width as usize;
        if comptime!(variant.add) {
            let other = row as usize * sizes.residual_stride as usize;
            let mut at = unit;
            while at < sizes.width {
                let value = Vector::<f32, N>::cast_from(x[from + at as usize]);
                let other = Vector::<f32, N>::cast_from(residual[other + at as usize]);
                sum[to + at as usize] = Vector::cast_from(value + other);
                at += units;
            }
        }
        let mut row_mean = f32::new(0.0);
        if comptime!(variant.centered) {
            let mut total = Vector::<f32, N>::new(0.0);
            let mut at = unit;
            while at < sizes.width {
                if comptime!(variant.add) {
                    total += Vector::cast_from(sum[to + at as usize]);
                } else {
                    total += Vector::cast_from(x[from + at as usize]);
                }
                at += units;
            }
            row_mean =
                row_sum(Vector::vector_sum(total), &mut shared, 32u32, group.planes) / sizes.len;
        }
        let mut squares = Vector::<f32, N>::new(0.0);
        let mut at = unit;
        while at < sizes.width {
            let value = if comptime!(variant.add) {
                sum[to + at as usize]
            } else {
                x[from + at as usize]
            };
            let value = Vector::<f32, N>::cast_from(value) - Vector::new(row_mean);
            squares += value * value;
            at += units;
        }
        let squares = row_sum(Vector::vector_sum(squares), &mut shared, 0u32, group.planes);
        let row_rstd = (squares / sizes.len + sizes.epsilon).inverse_sqrt();
        if unit == 0 {
            rstd[row as usize] = row_rstd;
            if comptime!(variant.centered) {
                mean[row as usize] = row_mean;
            }
        }
        let mut at = unit;
        while at < sizes.width {
            let value = if comptime!(variant.add) {
                sum[to + at as usize]
            } else {
                x[from + at as usize]
            };
            let mut gamma_value = Vector::<f32, N>::cast_from(gamma[at as usize]);
            if comptime!(variant.zero_centered_gamma) {
                gamma_value += Vector::new(1.0);
            }
            let value = Vector::<f32, N>::cast_from(value) - Vector::new(row_mean);
            let mut value = value * Vector::new(row_rstd) * gamma_value;
            if comptime!(variant.beta) {
                value += Vector::cast_from(beta[at as usize]);
            }
            let stored = Vector::<F, N>::cast_from(value);
            y[to + at as usize] = stored;
            if comptime!(variant.observed) {
                largest = max(largest, magnitude(stored));
            }
            at += units;
        }
    }
    if comptime!(variant.observed) {
        raise(amax, 0usize, largest, comptime!(group.planes * group.rows));
    }
}

/// Like [`backward_kernel`](super::backward_kernel), with the partial sums in memory, which the kernel
/// sets to zero first. Each unit reads and writes only its own elements.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn long_backward_kernel<F: Float, G: Float, N: Size>(
    dy: &[Vector<F, N>],
    x: &[Vector<F, N>],
    dsum: &[Vector<F, N>],
    gamma: &[Vector<G, N>],
    mean: &[f32],
    rstd: &[f32],
    dx: &mut [Vector<F, N>],
    dgamma_parts: &mut [Vector<f32, N>],
    dbeta_parts: &mut [Vector<f32, N>],
    amax: &mut [Atomic<u32>],
    sizes: BackwardSizes,
    #[comptime] group: RowGroup,
    #[comptime] variant: NormVariant,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::new_slice(128usize);
    let units = comptime!(group.planes * 32);
    let (unit, group_pos) = unit_and_row(group);
    let mut largest = u32::new(0);
    let parts = group_pos as usize * sizes.width as usize;
    let mut at = unit;
    while at < sizes.width {
        dgamma_parts[parts + at as usize] = Vector::new(0.0);
        if comptime!(variant.beta) {
            dbeta_parts[parts + at as usize] = Vector::new(0.0);
        }
        at += units;
    }
    let mut row = group_pos;
    let mut buffer = 0u32;
    while row < sizes.rows {
        let row_rstd = rstd[row as usize];
        let mut row_mean = f32::new(0.0);
        if comptime!(variant.centered) {
            row_mean = mean[row as usize];
        }
        let from_x = row as usize * sizes.x_stride as usize;
        let from_dy = row as usize * sizes.dy_stride as usize;
        let mut sum_g = Vector::<f32, N>::new(0.0);
        let mut sum_gn = Vector::<f32, N>::new(0.0);
        // Pass 1: sum g and g * n for their means, and add the row's share of dgamma and dbeta.
        let mut at = unit;
        while at < sizes.width {
            let dy = Vector::<f32, N>::cast_from(dy[from_dy + at as usize]);
            let n = Vector::<f32, N>::cast_from(x[from_x + at as usize]) - Vector::new(row_mean);
            let dy_n = dy * (n * Vector::new(row_rstd));
            let mut gamma_value = Vector::<f32, N>::cast_from(gamma[at as usize]);
            if comptime!(variant.zero_centered_gamma) {
                gamma_value += Vector::new(1.0);
            }
            dgamma_parts[parts + at as usize] += dy_n;
            if comptime!(variant.beta) {
                dbeta_parts[parts + at as usize] += dy;
            }
            sum_g += dy * gamma_value;
            sum_gn += dy_n * gamma_value;
            at += units;
        }
        let (sum_g, sum_gn) = row_sums(
            Vector::vector_sum(sum_g),
            Vector::vector_sum(sum_gn),
            &mut shared,
            buffer * 64,
            group.planes,
        );
        let mean_gn = sum_gn / sizes.len;
        let mut mean_g = f32::new(0.0);
        if comptime!(variant.centered) {
            mean_g = sum_g / sizes.len;
        }
        // Pass 2: compute dx.
        let mut at = unit;
        while at < sizes.width {
            let mut gamma_value = Vector::<f32, N>::cast_from(gamma[at as usize]);
            if comptime!(variant.zero_centered_gamma) {
                gamma_value += Vector::new(1.0);
            }
            let g = Vector::<f32, N>::cast_from(dy[from_dy + at as usize]) * gamma_value;
            let n = Vector::<f32, N>::cast_from(x[from_x + at as usize]) - Vector::new(row_mean);
            let n = n * Vector::new(row_rstd);
            let inner = g - Vector::new(mean_g) - n * Vector::new(mean_gn);
            let mut value = inner * Vector::new(row_rstd);
            if comptime!(variant.add) {
                let from = row as usize * sizes.dsum_stride as usize;
                value += Vector::cast_from(dsum[from + at as usize]);
            }
            let stored = Vector::<F, N>::cast_from(value);
            dx[row as usize * sizes.width as usize + at as usize] = stored;
            if comptime!(variant.observed) {
                largest = max(largest, magnitude(stored));
            }
            at += units;
        }
        row += sizes.groups;
        buffer = 1 - buffer;
    }
    if comptime!(variant.observed) {
        raise(amax, 0usize, largest, comptime!(group.planes * group.rows));
    }
}

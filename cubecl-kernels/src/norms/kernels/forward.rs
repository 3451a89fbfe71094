//! The forward pass of a norm, for rows that the registers of a group of units hold:
//! `y = (x - mean(x)) * rstd * gamma [+ beta]` with `rstd = 1 / sqrt(mean((x - mean(x))^2) + epsilon)`.
//! RMS norm has no mean and no beta. With a residual, `x` is the rounded sum of both.

use cubecl::prelude::*;

use super::{ForwardSizes, NormVariant};
use crate::kernel_parts::{RowGroup, magnitude, raise, row_sum, unit_and_row};

/// Normalizes rows; reads each row once and keeps it in registers. If it is observed, `amax[0]` is
/// raised to the bits of the largest magnitude in `y`. Buffers that the variant does not use may be
/// arbitrary ones.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn forward_kernel<F: Float, G: Float, H: Float, N: Size>(
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
    let vecs = comptime!(group.vecs_per_thread as usize);
    let (unit, row) = unit_and_row(group);
    let mut largest = u32::new(0);
    if row < sizes.rows {
        let from = row as usize * sizes.x_stride as usize;
        let to = row as usize * sizes.width as usize;
        let mut values = Array::<Vector<F, N>>::new(vecs);
        // The row is loaded.
        #[unroll]
        for i in 0..vecs {
            let at = unit + i as u32 * units;
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if at < sizes.width {
                value = x[from + at as usize];
            }
            values[i] = value;
        }
        // The residual is added.
        if comptime!(variant.add) {
            let from = row as usize * sizes.residual_stride as usize;
            #[unroll]
            for i in 0..vecs {
                let at = unit + i as u32 * units;
                if at < sizes.width {
                    let other = Vector::<f32, N>::cast_from(residual[from + at as usize]);
                    // Normalize the sum as others will read it, rounded.
                    let value = Vector::cast_from(Vector::<f32, N>::cast_from(values[i]) + other);
                    values[i] = value;
                    sum[to + at as usize] = value;
                }
            }
        }
        // The mean.
        let mut row_mean = f32::new(0.0);
        if comptime!(variant.centered) {
            let mut total = Vector::<f32, N>::new(0.0);
            #[unroll]
            for i in 0..vecs {
                total += Vector::cast_from(values[i]);
            }
            row_mean =
                row_sum(Vector::vector_sum(total), &mut shared, 32u32, group.planes) / sizes.len;
        }
        // The reciprocal of the standard deviation.
        let mut squares = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..vecs {
            // Skip elements past the row's end: their distance from the mean is not 0.
            if unit + i as u32 * units < sizes.width {
                let value = Vector::<f32, N>::cast_from(values[i]) - Vector::new(row_mean);
                squares += value * value;
            }
        }
        let squares = row_sum(Vector::vector_sum(squares), &mut shared, 0u32, group.planes);
        let row_rstd = (squares / sizes.len + sizes.epsilon).inverse_sqrt();
        if unit == 0 {
            rstd[row as usize] = row_rstd;
            if comptime!(variant.centered) {
                mean[row as usize] = row_mean;
            }
        }
        // The row is normalized.
        #[unroll]
        for i in 0..vecs {
            let at = unit + i as u32 * units;
            if at < sizes.width {
                let mut gamma_value = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(variant.zero_centered_gamma) {
                    gamma_value += Vector::new(1.0);
                }
                let value = Vector::<f32, N>::cast_from(values[i]) - Vector::new(row_mean);
                let mut value = value * Vector::new(row_rstd) * gamma_value;
                if comptime!(variant.beta) {
                    value += Vector::cast_from(beta[at as usize]);
                }
                let stored = Vector::<F, N>::cast_from(value);
                y[to + at as usize] = stored;
                if comptime!(variant.observed) {
                    largest = max(largest, magnitude(stored));
                }
            }
        }
    }
    if comptime!(variant.observed) {
        raise(amax, 0usize, largest, comptime!(group.planes * group.rows));
    }
}

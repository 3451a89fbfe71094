use cubecl::prelude::*;

use super::{ForwardSizes, NormVariant};
use crate::kernel_parts::{RowGroup, place, row_sum};

/// Normalizes rows; reads each row once and keeps it in registers. Buffers that the variant does
/// not use may be arbitrary ones.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn forward_kernel<F: Float, G: Float, H: Float, N: Size>(
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
    let held = comptime!(team.vecs_per_thread as usize);
    let (unit, row) = place(team);
    if row < sizes.rows {
        let from = row as usize * sizes.x_stride as usize;
        let to = row as usize * sizes.width as usize;
        let mut values = Array::<Vector<F, N>>::new(held);
        #[unroll]
        for i in 0..held {
            let at = unit + i as u32 * units;
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if at < sizes.width {
                value = x[from + at as usize];
            }
            values[i] = value;
        }
        if comptime!(flavor.add) {
            let from = row as usize * sizes.residual_stride as usize;
            #[unroll]
            for i in 0..held {
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
        let mut average = f32::new(0.0);
        if comptime!(flavor.centered) {
            let mut total = Vector::<f32, N>::new(0.0);
            #[unroll]
            for i in 0..held {
                total += Vector::cast_from(values[i]);
            }
            average =
                row_sum(Vector::vector_sum(total), &mut shared, 32u32, team.planes) / sizes.len;
        }
        let mut squares = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..held {
            // Skip elements past the row's end: their distance from the mean is not 0.
            if unit + i as u32 * units < sizes.width {
                let value = Vector::<f32, N>::cast_from(values[i]) - Vector::new(average);
                squares += value * value;
            }
        }
        let squares = row_sum(Vector::vector_sum(squares), &mut shared, 0u32, team.planes);
        let scale = (squares / sizes.len + sizes.epsilon).inverse_sqrt();
        if unit == 0 {
            inverse[row as usize] = scale;
            if comptime!(flavor.centered) {
                mean[row as usize] = average;
            }
        }
        #[unroll]
        for i in 0..held {
            let at = unit + i as u32 * units;
            if at < sizes.width {
                let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(flavor.zero_centered_gamma) {
                    factor += Vector::new(1.0);
                }
                let value = Vector::<f32, N>::cast_from(values[i]) - Vector::new(average);
                let mut value = value * Vector::new(scale) * factor;
                if comptime!(flavor.beta) {
                    value += Vector::cast_from(beta[at as usize]);
                }
                y[to + at as usize] = Vector::cast_from(value);
            }
        }
    }
}

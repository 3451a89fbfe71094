//! With `n = (x - mean) * rstd` and `g = dy * gamma` (or `dy * (1 + gamma)`):
//! `dx = (g - mean(g) - n * mean(g * n)) * rstd [+ dsum]`, `dgamma = sum_rows(dy * n)` and
//! `dbeta = sum_rows(dy)`. RMS norm has neither `mean` nor `mean(g)`.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::{BackwardSizes, NormVariant};
use crate::kernel_parts::{RowGroup, magnitude, raise, row_sums, unit_and_row};

/// Computes `dx` and partial sums of `dgamma` and `dbeta`. Each group processes every
/// `groups`-th row.
///
/// With stages, the row loads are software-pipelined with `cp.async`: `stages - 1` rows are in
/// flight while the group works on another. Each unit prefetches exactly the vectors that it will
/// consume, so no barrier is needed. This requires vectors of 16 bytes. The gradients of gamma and
/// beta accumulate in registers and are written as the group's row of the partial sums. If it is
/// observed, `amax[0]` is raised to the bits of the largest magnitude in `dx`.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn backward_kernel<F: Float, G: Float, N: Size>(
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
    // Alternate between two buffers for the sums, so that one barrier per row is enough.
    let mut shared = Shared::new_slice(128usize);
    let units = comptime!(group.planes * 32);
    let vecs = comptime!(group.vecs_per_thread as usize);
    let stages = comptime!(variant.stages);
    let staged = comptime!(stages > 0);
    let staged_len =
        comptime!((stages * group.vecs_per_thread * units * group.rows).max(1) as usize);
    let mut staged_x = Shared::<[Vector<F, N>]>::new_slice(staged_len);
    let mut staged_dy = Shared::<[Vector<F, N>]>::new_slice(staged_len);
    let mut staged_dsum =
        Shared::<[Vector<F, N>]>::new_slice(comptime!(if variant.add { staged_len } else { 1 }));
    let (unit, group_pos) = unit_and_row(group);
    let mut largest = u32::new(0);
    let mut dgamma_acc = Array::<Vector<f32, N>>::new(vecs);
    let mut dbeta_acc = Array::<Vector<f32, N>>::new(vecs);
    #[unroll]
    for i in 0..vecs {
        dgamma_acc[i] = Vector::new(0.0);
        dbeta_acc[i] = Vector::new(0.0);
    }
    // (Groups without a row load the last one; so do all prefetches past the last row.)
    let first = min(group_pos, sizes.rows - 1);
    let mut next_rstd = rstd[first as usize];
    let mut next_mean = f32::new(0.0);
    if comptime!(variant.centered) {
        next_mean = mean[first as usize];
    }
    if staged {
        #[unroll]
        for stage in 0..comptime!(stages - 1) {
            let ahead = min(group_pos + stage * sizes.groups, sizes.rows - 1) as usize;
            prefetch_row(
                ahead,
                stage,
                x,
                dy,
                dsum,
                &mut staged_x,
                &mut staged_dy,
                &mut staged_dsum,
                unit,
                &sizes,
                group,
                variant,
            );
        }
    }
    let mut row = group_pos;
    let mut buffer = 0u32;
    let mut stage = 0u32;
    while row < sizes.rows {
        // (Assigning a tuple of both would alias the variables instead of copying their values.)
        let row_mean = next_mean;
        let row_rstd = next_rstd;
        let next = min(row + sizes.groups, sizes.rows - 1) as usize;
        next_rstd = rstd[next];
        if comptime!(variant.centered) {
            next_mean = mean[next];
        }
        let mut row_x = Array::<Vector<F, N>>::new(vecs);
        let mut row_dy = Array::<Vector<F, N>>::new(vecs);
        let from_sum = row as usize * sizes.dsum_stride as usize;
        if staged {
            let last = (stage + comptime!(stages - 1)) % stages;
            let ahead = min(row + comptime!(stages - 1) * sizes.groups, sizes.rows - 1) as usize;
            prefetch_row(
                ahead,
                last,
                x,
                dy,
                dsum,
                &mut staged_x,
                &mut staged_dy,
                &mut staged_dsum,
                unit,
                &sizes,
                group,
                variant,
            );
            // Wait until only the latest `stages - 1` rows are pending; PTX needs a literal here.
            comptime!(assert_eq!(stages, 3));
            gpu_asm!("cp.async.wait_group 2;");
            #[unroll]
            for i in 0..vecs {
                let at = slot(stage, i as u32, group);
                row_x[i] = staged_x[at];
                row_dy[i] = staged_dy[at];
            }
        } else {
            load(
                x,
                row as usize * sizes.x_stride as usize,
                &mut row_x,
                unit,
                sizes.width,
                group,
            );
            load(
                dy,
                row as usize * sizes.dy_stride as usize,
                &mut row_dy,
                unit,
                sizes.width,
                group,
            );
        }
        let mut sum_g = Vector::<f32, N>::new(0.0);
        let mut sum_gn = Vector::<f32, N>::new(0.0);
        // Pass 1: sum g and g * n for their means, and add the row's share of dgamma and dbeta.
        #[unroll]
        for i in 0..vecs {
            let at = unit + i as u32 * units;
            if at < sizes.width {
                let dy = Vector::<f32, N>::cast_from(row_dy[i]);
                let n = Vector::<f32, N>::cast_from(row_x[i]) - Vector::new(row_mean);
                let dy_n = dy * (n * Vector::new(row_rstd));
                let mut gamma_value = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(variant.zero_centered_gamma) {
                    gamma_value += Vector::new(1.0);
                }
                dgamma_acc[i] += dy_n;
                if comptime!(variant.beta) {
                    dbeta_acc[i] += dy;
                }
                sum_g += dy * gamma_value;
                sum_gn += dy_n * gamma_value;
            }
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
        #[unroll]
        for i in 0..vecs {
            let at = unit + i as u32 * units;
            if at < sizes.width {
                let mut gamma_value = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(variant.zero_centered_gamma) {
                    gamma_value += Vector::new(1.0);
                }
                let g = Vector::<f32, N>::cast_from(row_dy[i]) * gamma_value;
                let n = Vector::<f32, N>::cast_from(row_x[i]) - Vector::new(row_mean);
                let n = n * Vector::new(row_rstd);
                let inner = g - Vector::new(mean_g) - n * Vector::new(mean_gn);
                let mut value = inner * Vector::new(row_rstd);
                if comptime!(variant.add && staged) {
                    value += Vector::cast_from(staged_dsum[slot(stage, i as u32, group)]);
                }
                if comptime!(variant.add && !staged) {
                    value += Vector::cast_from(dsum[from_sum + at as usize]);
                }
                let stored = Vector::<F, N>::cast_from(value);
                dx[row as usize * sizes.width as usize + at as usize] = stored;
                if comptime!(variant.observed) {
                    largest = max(largest, magnitude(stored));
                }
            }
        }
        row += sizes.groups;
        buffer = 1 - buffer;
        if staged {
            stage = (stage + 1) % stages;
        }
    }
    #[unroll]
    for i in 0..vecs {
        let at = unit + i as u32 * units;
        if at < sizes.width {
            let to = group_pos as usize * sizes.width as usize + at as usize;
            dgamma_parts[to] = dgamma_acc[i];
            if comptime!(variant.beta) {
                dbeta_parts[to] = dbeta_acc[i];
            }
        }
    }
    if comptime!(variant.observed) {
        raise(amax, 0usize, largest, comptime!(group.planes * group.rows));
    }
}

/// Loads the unit's vectors of the row that starts at `from`.
#[cube]
fn load<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    from: usize,
    into: &mut Array<Vector<F, N>>,
    unit: u32,
    width: u32,
    #[comptime] group: RowGroup,
) {
    #[unroll]
    for i in 0..comptime!(group.vecs_per_thread as usize) {
        let at = unit + i as u32 * comptime!(group.planes * 32);
        if at < width {
            into[i] = rows[from + at as usize];
        }
    }
}

/// The index of this unit's vector `i` in a stage.
#[cube]
fn slot(stage: u32, i: u32, #[comptime] group: RowGroup) -> usize {
    let all = comptime!(group.planes * group.rows * 32);
    ((stage * comptime!(group.vecs_per_thread) + i) * all + UNIT_POS) as usize
}

/// Starts asynchronous copies of the unit's vectors of a row of each input into a stage, as one
/// group of `cp.async`.
#[cube]
fn prefetch_row<F: Float, N: Size>(
    row: usize,
    stage: u32,
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dsum: &[Vector<F, N>],
    staged_x: &mut Shared<[Vector<F, N>]>,
    staged_dy: &mut Shared<[Vector<F, N>]>,
    staged_dsum: &mut Shared<[Vector<F, N>]>,
    unit: u32,
    sizes: &BackwardSizes,
    #[comptime] group: RowGroup,
    #[comptime] variant: NormVariant,
) {
    let from_x = row * sizes.x_stride as usize;
    prefetch(x, from_x, staged_x, stage, unit, sizes.width, group);
    let from_dy = row * sizes.dy_stride as usize;
    prefetch(dy, from_dy, staged_dy, stage, unit, sizes.width, group);
    if comptime!(variant.add) {
        let from = row * sizes.dsum_stride as usize;
        prefetch(dsum, from, staged_dsum, stage, unit, sizes.width, group);
    }
    gpu_asm!("cp.async.commit_group;");
}

/// Starts asynchronous copies of the unit's vectors of the row that starts at `from`.
#[cube]
fn prefetch<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    from: usize,
    into: &mut Shared<[Vector<F, N>]>,
    stage: u32,
    unit: u32,
    width: u32,
    #[comptime] group: RowGroup,
) {
    let lanes = N::value();
    #[unroll]
    for i in 0..comptime!(group.vecs_per_thread) {
        let at = unit + i * comptime!(group.planes * 32);
        if at < width {
            let source = from + at as usize;
            let target = slot(stage, i, group);
            let len = comptime!(lanes as u32);
            copy_async(
                &rows[source..source + 1],
                &mut into[target..target + 1],
                len,
            );
        }
    }
}

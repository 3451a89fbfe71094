use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::{BackwardSizes, NormVariant};
use crate::kernel_parts::{RowGroup, place, row_sums};

/// Computes `dx` and partial sums of the gradients of gamma and beta. Each team processes every
/// `teams`-th row.
///
/// With stages, the row loads are software-pipelined with `cp.async`: `stages - 1` rows are in
/// flight while the team works on another. Each unit prefetches exactly the vectors that it will
/// consume, so no barrier is needed. This requires vectors of 16 bytes. The gradients of gamma and
/// beta accumulate in registers and are written as the team's row of the partial sums.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn backward_kernel<F: Float, G: Float, N: Size>(
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
    // Alternate between two buffers for the sums, so that one barrier per row is enough.
    let mut shared = Shared::new_slice(128usize);
    let units = comptime!(team.planes * 32);
    let held = comptime!(team.vecs_per_thread as usize);
    let stages = comptime!(flavor.stages);
    let staged = comptime!(stages > 0);
    let places = comptime!((stages * team.vecs_per_thread * units * team.rows).max(1) as usize);
    let mut coming_x = Shared::<[Vector<F, N>]>::new_slice(places);
    let mut coming_dy = Shared::<[Vector<F, N>]>::new_slice(places);
    let mut coming_dsum =
        Shared::<[Vector<F, N>]>::new_slice(comptime!(if flavor.add { places } else { 1 }));
    let (unit, worker) = place(team);
    let mut for_gamma = Array::<Vector<f32, N>>::new(held);
    let mut for_beta = Array::<Vector<f32, N>>::new(held);
    #[unroll]
    for i in 0..held {
        for_gamma[i] = Vector::new(0.0);
        for_beta[i] = Vector::new(0.0);
    }
    // (Teams without a row load the last one; so do all prefetches past the last row.)
    let first = min(worker, sizes.rows - 1);
    let mut next_scale = inverse[first as usize];
    let mut next_average = f32::new(0.0);
    if comptime!(flavor.centered) {
        next_average = mean[first as usize];
    }
    if staged {
        #[unroll]
        for stage in 0..comptime!(stages - 1) {
            let ahead = min(worker + stage * sizes.teams, sizes.rows - 1) as usize;
            fetch(
                x,
                ahead * sizes.x_stride as usize,
                &mut coming_x,
                stage,
                unit,
                sizes.width,
                team,
            );
            fetch(
                dy,
                ahead * sizes.dy_stride as usize,
                &mut coming_dy,
                stage,
                unit,
                sizes.width,
                team,
            );
            if comptime!(flavor.add) {
                let from = ahead * sizes.dsum_stride as usize;
                fetch(dsum, from, &mut coming_dsum, stage, unit, sizes.width, team);
            }
            gpu_asm!("cp.async.commit_group;");
        }
    }
    let mut row = worker;
    let mut turn = 0u32;
    let mut stage = 0u32;
    while row < sizes.rows {
        // (Assigning a tuple of both would alias the variables instead of copying their values.)
        let average = next_average;
        let scale = next_scale;
        let next = min(row + sizes.teams, sizes.rows - 1) as usize;
        next_scale = inverse[next];
        if comptime!(flavor.centered) {
            next_average = mean[next];
        }
        let mut row_x = Array::<Vector<F, N>>::new(held);
        let mut row_dy = Array::<Vector<F, N>>::new(held);
        let from_sum = row as usize * sizes.dsum_stride as usize;
        if staged {
            let last = (stage + comptime!(stages - 1)) % stages;
            let ahead = min(row + comptime!(stages - 1) * sizes.teams, sizes.rows - 1) as usize;
            fetch(
                x,
                ahead * sizes.x_stride as usize,
                &mut coming_x,
                last,
                unit,
                sizes.width,
                team,
            );
            fetch(
                dy,
                ahead * sizes.dy_stride as usize,
                &mut coming_dy,
                last,
                unit,
                sizes.width,
                team,
            );
            if comptime!(flavor.add) {
                let from = ahead * sizes.dsum_stride as usize;
                fetch(dsum, from, &mut coming_dsum, last, unit, sizes.width, team);
            }
            gpu_asm!("cp.async.commit_group;");
            // Wait until only the latest `stages - 1` groups are pending; PTX needs a literal here.
            comptime!(assert_eq!(stages, 3));
            gpu_asm!("cp.async.wait_group 2;");
            #[unroll]
            for i in 0..held {
                let at = slot(stage, i as u32, team);
                row_x[i] = coming_x[at];
                row_dy[i] = coming_dy[at];
            }
        } else {
            load(
                x,
                row as usize * sizes.x_stride as usize,
                &mut row_x,
                unit,
                sizes.width,
                team,
            );
            load(
                dy,
                row as usize * sizes.dy_stride as usize,
                &mut row_dy,
                unit,
                sizes.width,
                team,
            );
        }
        let mut sum_g = Vector::<f32, N>::new(0.0);
        let mut sum_gn = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..held {
            let at = unit + i as u32 * units;
            if at < sizes.width {
                let dy = Vector::<f32, N>::cast_from(row_dy[i]);
                let n = Vector::<f32, N>::cast_from(row_x[i]) - Vector::new(average);
                let dy_n = dy * (n * Vector::new(scale));
                let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(flavor.zero_centered_gamma) {
                    factor += Vector::new(1.0);
                }
                for_gamma[i] += dy_n;
                if comptime!(flavor.beta) {
                    for_beta[i] += dy;
                }
                sum_g += dy * factor;
                sum_gn += dy_n * factor;
            }
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
        #[unroll]
        for i in 0..held {
            let at = unit + i as u32 * units;
            if at < sizes.width {
                let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(flavor.zero_centered_gamma) {
                    factor += Vector::new(1.0);
                }
                let g = Vector::<f32, N>::cast_from(row_dy[i]) * factor;
                let n = Vector::<f32, N>::cast_from(row_x[i]) - Vector::new(average);
                let n = n * Vector::new(scale);
                let inner = g - Vector::new(mean_g) - n * Vector::new(mean_gn);
                let mut value = inner * Vector::new(scale);
                if comptime!(flavor.add && staged) {
                    value += Vector::cast_from(coming_dsum[slot(stage, i as u32, team)]);
                }
                if comptime!(flavor.add && !staged) {
                    value += Vector::cast_from(dsum[from_sum + at as usize]);
                }
                dx[row as usize * sizes.width as usize + at as usize] = Vector::cast_from(value);
            }
        }
        row += sizes.teams;
        turn = 1 - turn;
        if staged {
            stage = (stage + 1) % stages;
        }
    }
    #[unroll]
    for i in 0..held {
        let at = unit + i as u32 * units;
        if at < sizes.width {
            let to = worker as usize * sizes.width as usize + at as usize;
            dgamma[to] = for_gamma[i];
            if comptime!(flavor.beta) {
                dbeta[to] = for_beta[i];
            }
        }
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
    #[comptime] team: RowGroup,
) {
    #[unroll]
    for i in 0..comptime!(team.vecs_per_thread as usize) {
        let at = unit + i as u32 * comptime!(team.planes * 32);
        if at < width {
            into[i] = rows[from + at as usize];
        }
    }
}

/// The index of this unit's vector `i` in a stage.
#[cube]
fn slot(stage: u32, i: u32, #[comptime] team: RowGroup) -> usize {
    let all = comptime!(team.planes * team.rows * 32);
    ((stage * comptime!(team.vecs_per_thread) + i) * all + UNIT_POS) as usize
}

/// Starts asynchronous copies of the unit's vectors of the row that starts at `from`.
#[cube]
fn fetch<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    from: usize,
    into: &mut Shared<[Vector<F, N>]>,
    stage: u32,
    unit: u32,
    width: u32,
    #[comptime] team: RowGroup,
) {
    let lanes = N::value();
    #[unroll]
    for i in 0..comptime!(team.vecs_per_thread) {
        let at = unit + i * comptime!(team.planes * 32);
        if at < width {
            let source = from + at as usize;
            let target = slot(stage, i, team);
            let len = comptime!(lanes as u32);
            copy_async(
                &rows[source..source + 1],
                &mut into[target..target + 1],
                len,
            );
        }
    }
}

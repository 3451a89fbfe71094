use cubecl::prelude::*;

use super::Flavor;
use crate::cube::{Team, place, row_sums};

/// Each team takes every `teams`-th row. Where registers have room it loads the next row while it sums
/// over the last. Gradients of gamma and beta add up in its registers and end as its row of the partial sums.
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
    rows: u32,
    width: u32,
    dy_stride: u32,
    x_stride: u32,
    dsum_stride: u32,
    len: f32,
    teams: u32,
    #[comptime] team: Team,
    #[comptime] flavor: Flavor,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    // Two places for the sums, in turns: one barrier a row is enough.
    let mut shared = Shared::new_slice(128usize);
    let units = comptime!(team.planes * 32);
    let held = comptime!(team.held as usize);
    // Two vectors of 16 bytes of both rows are 32 registers, and as many are sums of gradients.
    let ahead = comptime!(team.held <= 2);
    let (unit, worker) = place(team);
    let mut next_x = Array::<Vector<F, N>>::new(held);
    let mut next_dy = Array::<Vector<F, N>>::new(held);
    let mut next_average = f32::new(0.0);
    let mut next_scale = f32::new(0.0);
    let mut for_gamma = Array::<Vector<f32, N>>::new(held);
    let mut for_beta = Array::<Vector<f32, N>>::new(held);
    #[unroll]
    for i in 0..held {
        for_gamma[i] = Vector::new(0.0);
        for_beta[i] = Vector::new(0.0);
        next_x[i] = Vector::new(F::new(0.0));
        next_dy[i] = Vector::new(F::new(0.0));
    }
    if comptime!(ahead) {
        // (Teams without a row load the last one, as all do at their end.)
        let first = min(worker, rows - 1);
        next_scale = inverse[first as usize];
        if comptime!(flavor.centered) {
            next_average = mean[first as usize];
        }
        load(x, first as usize * x_stride as usize, &mut next_x, unit, width, team);
        load(dy, first as usize * dy_stride as usize, &mut next_dy, unit, width, team);
    }
    let mut row = worker;
    let mut turn = 0u32;
    while row < rows {
        if comptime!(!ahead) {
            next_scale = inverse[row as usize];
            if comptime!(flavor.centered) {
                next_average = mean[row as usize];
            }
            load(x, row as usize * x_stride as usize, &mut next_x, unit, width, team);
            load(dy, row as usize * dy_stride as usize, &mut next_dy, unit, width, team);
        }
        let average = next_average;
        let scale = next_scale;
        let mut row_x = Array::<Vector<F, N>>::new(held);
        let mut row_dy = Array::<Vector<F, N>>::new(held);
        #[unroll]
        for i in 0..held {
            row_x[i] = next_x[i];
            row_dy[i] = next_dy[i];
        }
        if comptime!(ahead) {
            let next = min(row + teams, rows - 1);
            next_scale = inverse[next as usize];
            if comptime!(flavor.centered) {
                next_average = mean[next as usize];
            }
            load(x, next as usize * x_stride as usize, &mut next_x, unit, width, team);
            load(dy, next as usize * dy_stride as usize, &mut next_dy, unit, width, team);
        }
        let from_sum = row as usize * dsum_stride as usize;
        let mut added = Array::<Vector<F, N>>::new(held);
        if comptime!(flavor.add && ahead) {
            load(dsum, from_sum, &mut added, unit, width, team);
        }
        let mut sum_g = Vector::<f32, N>::new(0.0);
        let mut sum_gn = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..held {
            let at = unit + i as u32 * units;
            if at < width {
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
        let mean_gn = sum_gn / len;
        let mut mean_g = f32::new(0.0);
        if comptime!(flavor.centered) {
            mean_g = sum_g / len;
        }
        #[unroll]
        for i in 0..held {
            let at = unit + i as u32 * units;
            if at < width {
                let mut factor = Vector::<f32, N>::cast_from(gamma[at as usize]);
                if comptime!(flavor.zero_centered_gamma) {
                    factor += Vector::new(1.0);
                }
                let g = Vector::<f32, N>::cast_from(row_dy[i]) * factor;
                let n = Vector::<f32, N>::cast_from(row_x[i]) - Vector::new(average);
                let n = n * Vector::new(scale);
                let inner = g - Vector::new(mean_g) - n * Vector::new(mean_gn);
                let mut value = inner * Vector::new(scale);
                if comptime!(flavor.add && ahead) {
                    value += Vector::cast_from(added[i]);
                }
                if comptime!(flavor.add && !ahead) {
                    value += Vector::cast_from(dsum[from_sum + at as usize]);
                }
                dx[row as usize * width as usize + at as usize] = Vector::cast_from(value);
            }
        }
        row += teams;
        turn = 1 - turn;
    }
    #[unroll]
    for i in 0..held {
        let at = unit + i as u32 * units;
        if at < width {
            let to = worker as usize * width as usize + at as usize;
            dgamma[to] = for_gamma[i];
            if comptime!(flavor.beta) {
                dbeta[to] = for_beta[i];
            }
        }
    }
}

/// The unit's vectors of the row that starts at `from`.
#[cube]
fn load<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    from: usize,
    into: &mut Array<Vector<F, N>>,
    unit: u32,
    width: u32,
    #[comptime] team: Team,
) {
    #[unroll]
    for i in 0..comptime!(team.held as usize) {
        let at = unit + i as u32 * comptime!(team.planes * 32);
        if at < width {
            into[i] = rows[from + at as usize];
        }
    }
}

use burn::tensor::{bf16, f16};
use cubecl::prelude::*;

use super::many::{QUAD, put_quad, quad_at};
use super::{UNITS, factor_of};
use crate::kernel_parts::{PLANE, magnitude, raise};

/// The numbers of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::optimizer) struct AdamwNumbers {
    pub(in crate::optimizer) grad_factor: f32,
    pub(in crate::optimizer) beta_1: f32,
    /// `1 - beta_1`.
    pub(in crate::optimizer) rest_1: f32,
    pub(in crate::optimizer) beta_2: f32,
    /// `1 - beta_2`.
    pub(in crate::optimizer) rest_2: f32,
    /// Corrects the bias of the root of the second moment.
    pub(in crate::optimizer) root_factor: f32,
    pub(in crate::optimizer) epsilon: f32,
    /// The factor of the parameter, from weight decay.
    pub(in crate::optimizer) keep: f32,
    /// The learning rate, with the correction of the first moment's bias.
    pub(in crate::optimizer) rate: f32,
}

/// One AdamW step. `rounded` is used only if `rounds` is set, and `factor` only if `scales` is.
#[cube(launch)]
#[allow(
    clippy::too_many_arguments,
    reason = "the buffers of the optimizer state"
)]
pub(in crate::optimizer) fn adamw_kernel<
    G: Float,
    P: Float,
    M: Float,
    V: Float,
    R: Float,
    N: Size,
>(
    grad: &[Vector<G, N>],
    param: &mut [Vector<P, N>],
    exp_avg: &mut [Vector<M, N>],
    exp_avg_sq: &mut [Vector<V, N>],
    rounded: &mut [Vector<R, N>],
    factor: &[f32],
    vectors: usize,
    numbers: AdamwNumbers,
    #[comptime] rounds: bool,
    #[comptime] scales: bool,
    #[define(G, P, M, V, R)] _dtypes: [ElemType; 5],
) {
    if ABSOLUTE_POS < vectors {
        let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, scales);
        let mut p = Vector::<f32, N>::cast_from(param[ABSOLUTE_POS]);
        if goes {
            let g = Vector::cast_from(grad[ABSOLUTE_POS]) * Vector::new(grad_factor);
            let m = decayed(
                Vector::cast_from(exp_avg[ABSOLUTE_POS]),
                g,
                numbers.beta_1,
                numbers.rest_1,
            );
            let v = decayed(
                Vector::cast_from(exp_avg_sq[ABSOLUTE_POS]),
                g * g,
                numbers.beta_2,
                numbers.rest_2,
            );
            p = moved(p, m, v, &numbers);
            exp_avg[ABSOLUTE_POS] = Vector::cast_from(m);
            exp_avg_sq[ABSOLUTE_POS] = Vector::cast_from(v);
            param[ABSOLUTE_POS] = Vector::cast_from(p);
        }
        if rounds {
            rounded[ABSOLUTE_POS] = Vector::cast_from(p);
        }
    }
}

/// One AdamW step of several parameters. `table` has for each cube: the addresses of the first quad
/// of the gradient, the parameter, the two moments and, with `narrow`, the rounded parameter; then
/// the number of quads. `done: [1]` is written by the same launch.
///
/// If it is `observed`, the table also has the index of a number in `amaxes` for each cube, after the
/// number of quads. It is raised to the bits of the largest magnitude of the parameter, or of the
/// rounded one. Otherwise `amaxes` may be any buffer.
#[cube(launch_unchecked)]
pub(in crate::optimizer) fn adamw_of_many_kernel(
    table: &[u64],
    done: &mut [u32],
    amaxes: &mut [Atomic<u32>],
    factor: &[f32],
    numbers: AdamwNumbers,
    #[comptime] narrow: Option<&'static str>,
    #[comptime] scales: bool,
    #[comptime] observed: bool,
) {
    if ABSOLUTE_POS == 0 {
        done[0] = 1u32;
    }
    let buffers = comptime!(if narrow.is_some() { 5usize } else { 4usize });
    let entry = CUBE_POS * comptime!(buffers + if observed { 2 } else { 1 });
    let grad = table[entry];
    let param = table[entry + 1];
    let exp_avg = table[entry + 2];
    let exp_avg_sq = table[entry + 3];
    let rounded = table[entry + buffers - 1];
    let quads = table[entry + buffers] as usize;
    let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, scales);
    let mut largest = u32::new(0);
    let mut at = UNIT_POS as usize;
    while at < quads {
        let place = at as u64 * QUAD;
        let mut p = quad_at(param + place);
        if goes {
            let g = quad_at(grad + place) * Vector::new(grad_factor);
            let m = quad_at(exp_avg + place);
            let v = quad_at(exp_avg_sq + place);
            let m = decayed(m, g, numbers.beta_1, numbers.rest_1);
            let v = decayed(v, g * g, numbers.beta_2, numbers.rest_2);
            p = moved(p, m, v, &numbers);
            put_quad(exp_avg + place, m, comptime!(None));
            put_quad(exp_avg_sq + place, v, comptime!(None));
            put_quad(param + place, p, comptime!(None));
        }
        if comptime!(narrow.is_some()) {
            put_quad(rounded + place / 2, p, narrow);
        }
        if comptime!(observed) {
            largest = max(largest, magnitude(p));
        }
        at += UNITS;
    }
    if comptime!(observed) {
        let index = table[entry + buffers + 1] as usize;
        let planes = comptime!(UNITS as u32 / PLANE);
        raise(amaxes, index, rounded_magnitude(largest, narrow), planes);
    }
}

/// The bits of a magnitude after it is rounded to nearest in the dtype with the PTX name `as_narrow`:
/// the largest of rounded numbers is the rounded largest one.
#[cube]
fn rounded_magnitude(bits: u32, #[comptime] as_narrow: Option<&'static str>) -> u32 {
    let value = f32::reinterpret(bits);
    if comptime!(as_narrow == Some("bf16")) {
        u32::reinterpret(f32::cast_from(bf16::cast_from(value)))
    } else if comptime!(as_narrow == Some("f16")) {
        u32::reinterpret(f32::cast_from(f16::cast_from(value)))
    } else {
        bits
    }
}

/// Adds `x` to a decaying mean.
#[cube]
fn decayed<N: Size>(
    mean: Vector<f32, N>,
    x: Vector<f32, N>,
    beta: f32,
    rest: f32,
) -> Vector<f32, N> {
    mean * Vector::new(beta) + x * Vector::new(rest)
}

/// The parameter after the step.
#[cube]
fn moved<N: Size>(
    p: Vector<f32, N>,
    m: Vector<f32, N>,
    v: Vector<f32, N>,
    numbers: &AdamwNumbers,
) -> Vector<f32, N> {
    let root = v.sqrt() * Vector::new(numbers.root_factor) + Vector::new(numbers.epsilon);
    p * Vector::new(numbers.keep) - m / root * Vector::new(numbers.rate)
}

//! The kernels: one unit a vector, 16 bytes of the widest buffer. Arithmetic is in f32. How many there are
//! is said: a buffer's length is that of its memory, from where a view of it begins to the end.

use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 256;

#[cube(launch)]
pub(super) fn copy_kernel<F: Float, N: Size>(
    from: &[Vector<F, N>],
    to: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

/// `rounded` is looked at only if it `rounds`, `factor` only if it `scales`.
#[cube(launch)]
#[allow(clippy::too_many_arguments, reason = "the state and what the host knows of the step")]
pub(super) fn adamw_kernel<G: Float, P: Float, M: Float, V: Float, R: Float, N: Size>(
    grad: &[Vector<G, N>],
    param: &mut [Vector<P, N>],
    exp_avg: &mut [Vector<M, N>],
    exp_avg_sq: &mut [Vector<V, N>],
    rounded: &mut [Vector<R, N>],
    factor: &[f32],
    vectors: usize,
    grad_factor: f32,
    beta_1: f32,
    rest_1: f32,
    beta_2: f32,
    rest_2: f32,
    root_factor: f32,
    epsilon: f32,
    keep: f32,
    rate: f32,
    #[comptime] rounds: bool,
    #[comptime] scales: bool,
    #[define(G, P, M, V, R)] _dtypes: [ElemType; 5],
) {
    if ABSOLUTE_POS < vectors {
        let mut grad_factor = grad_factor;
        let mut goes = true;
        if scales {
            let factor = factor[0];
            // Neither an infinity nor NaN is.
            goes = factor.abs() <= f32::new(f32::MAX);
            grad_factor *= factor;
        }
        let mut p = Vector::<f32, N>::cast_from(param[ABSOLUTE_POS]);
        if goes {
            let g = Vector::cast_from(grad[ABSOLUTE_POS]) * Vector::new(grad_factor);
            let m = Vector::cast_from(exp_avg[ABSOLUTE_POS]) * Vector::new(beta_1)
                + g * Vector::new(rest_1);
            let v = Vector::cast_from(exp_avg_sq[ABSOLUTE_POS]) * Vector::new(beta_2)
                + g * g * Vector::new(rest_2);
            let root = v.sqrt() * Vector::new(root_factor) + Vector::new(epsilon);
            p = p * Vector::new(keep) - m / root * Vector::new(rate);
            exp_avg[ABSOLUTE_POS] = Vector::cast_from(m);
            exp_avg_sq[ABSOLUTE_POS] = Vector::cast_from(v);
            param[ABSOLUTE_POS] = Vector::cast_from(p);
        }
        if rounds {
            rounded[ABSOLUTE_POS] = Vector::cast_from(p);
        }
    }
}

#[cube(launch)]
pub(super) fn scale_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    factor: &[f32],
    out: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let wide = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        out[ABSOLUTE_POS] = Vector::cast_from(wide * Vector::new(factor[0]));
    }
}

/// Each cube sums every `SUMS`-th stretch of as many vectors as it has units.
#[cube(launch)]
pub(super) fn squares_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    sums: &mut [f32],
    vectors: u64,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::new_slice(8usize);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut at = ABSOLUTE_POS;
    let step = CUBE_COUNT * UNITS;
    while at < vectors as usize {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += value * value;
        at += step;
    }
    let sum = plane_sum(Vector::vector_sum(sum));
    if UNIT_POS_X == 0 {
        shared[UNIT_POS_Y as usize] = sum;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f32::new(0.0);
        #[unroll]
        for i in 0..8 {
            total += shared[i];
        }
        sums[CUBE_POS] = total;
    }
}

/// One cube: each unit sums every 256th, the first adds the units' sums. What lies behind the first
/// `len` is the allocation's padding, or another tensor's.
#[cube(launch)]
pub(super) fn total_kernel(sums: &[f32], out: &mut [f32], len: u64) {
    let mut shared = Shared::<[f64]>::new_slice(UNITS);
    let mut sum = f64::new(0.0);
    let mut at = UNIT_POS as usize;
    while at < len as usize {
        sum += f64::cast_from(sums[at]);
        at += UNITS;
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f64::new(0.0);
        for i in 0..UNITS {
            total += shared[i];
        }
        out[0] = f32::cast_from(total);
    }
}

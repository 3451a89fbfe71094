use cubecl::prelude::*;

use super::factor_of;

/// The sign: 1 or -1; 0 and NaN are neither above nor below 0 and are returned unchanged.
#[cube]
fn sign<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let zero = Vector::<f32, N>::new(0.0);
    let below = select_many(x.less_than(&zero), Vector::new(-1.0), x);
    select_many(x.greater_than(&zero), Vector::new(1.0), below)
}

/// The numbers of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::optimizer) struct LionNumbers {
    pub(in crate::optimizer) grad_factor: f32,
    pub(in crate::optimizer) beta_1: f32,
    /// `1 - beta_1`.
    pub(in crate::optimizer) rest_1: f32,
    pub(in crate::optimizer) beta_2: f32,
    /// `1 - beta_2`.
    pub(in crate::optimizer) rest_2: f32,
    /// The factor of the parameter, from weight decay.
    pub(in crate::optimizer) keep: f32,
    pub(in crate::optimizer) lr: f32,
}

/// One Lion step. `rounded` is used only if `rounds` is set, and `factor` only if `scales` is.
#[cube(launch)]
#[allow(
    clippy::too_many_arguments,
    reason = "the buffers of the optimizer state"
)]
pub(in crate::optimizer) fn lion_kernel<G: Float, P: Float, M: Float, R: Float, N: Size>(
    grad: &[Vector<G, N>],
    param: &mut [Vector<P, N>],
    exp_avg: &mut [Vector<M, N>],
    rounded: &mut [Vector<R, N>],
    factor: &[f32],
    vectors: usize,
    numbers: LionNumbers,
    #[comptime] rounds: bool,
    #[comptime] scales: bool,
    #[define(G, P, M, R)] _dtypes: [ElemType; 4],
) {
    if ABSOLUTE_POS < vectors {
        let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, scales);
        let mut p = Vector::<f32, N>::cast_from(param[ABSOLUTE_POS]);
        if goes {
            let g = Vector::cast_from(grad[ABSOLUTE_POS]) * Vector::new(grad_factor);
            let m = Vector::<f32, N>::cast_from(exp_avg[ABSOLUTE_POS]);
            let update = sign(m * Vector::new(numbers.beta_1) + g * Vector::new(numbers.rest_1));
            p = p * Vector::new(numbers.keep) - update * Vector::new(numbers.lr);
            let m = m * Vector::new(numbers.beta_2) + g * Vector::new(numbers.rest_2);
            exp_avg[ABSOLUTE_POS] = Vector::cast_from(m);
            param[ABSOLUTE_POS] = Vector::cast_from(p);
        }
        if rounds {
            rounded[ABSOLUTE_POS] = Vector::cast_from(p);
        }
    }
}

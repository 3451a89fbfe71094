use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;

use super::{cubes, factor_of, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::{LionState, LionStep};

pub(in crate::optimizer) fn lion(
    state: LionState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &LionStep,
) -> LionState {
    let LionState {
        param,
        exp_avg,
        rounded,
    } = state;
    let [grad, param, exp_avg] = [grad, param, exp_avg].map(on_gpu);
    let [rounded, factor] = [rounded, factor].map(|x| x.map(on_gpu));
    let len = grad.meta.num_elements();
    let [param, exp_avg] = [param, exp_avg].map(own);
    let LionStep {
        lr,
        beta_1,
        beta_2,
        weight_decay,
        grad_factor,
    } = *step;
    let rounds = rounded.is_some();
    let scales = factor.is_some();
    let rounded_arg = or_none(&rounded, &grad, DType::BF16);
    let factor = or_none(&factor, &grad, DType::F32);
    let dtypes = [grad.dtype, param.dtype, exp_avg.dtype, rounded_arg.dtype];
    let lanes = lanes(len, &dtypes);
    lion_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        exp_avg.clone().into_buffer_arg(),
        rounded_arg.into_buffer_arg(),
        factor.into_buffer_arg(),
        len / lanes,
        LionNumbersLaunch {
            grad_factor: grad_factor as f32,
            beta_1: beta_1 as f32,
            rest_1: (1.0 - beta_1) as f32,
            beta_2: beta_2 as f32,
            rest_2: (1.0 - beta_2) as f32,
            keep: (1.0 - lr * weight_decay) as f32,
            lr: lr as f32,
        },
        rounds,
        scales,
        dtypes.map(dtype_to_storage_type),
    );
    LionState {
        param: wrap(param),
        exp_avg: wrap(exp_avg),
        rounded: rounded.map(wrap),
    }
}

/// The sign: 1 or -1; 0 and NaN are neither above nor below 0 and are returned unchanged.
#[cube]
fn sign<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let zero = Vector::<f32, N>::new(0.0);
    let below = select_many(x.less_than(&zero), Vector::new(-1.0), x);
    select_many(x.greater_than(&zero), Vector::new(1.0), below)
}

/// The numbers of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct LionNumbers {
    grad_factor: f32,
    beta_1: f32,
    /// `1 - beta_1`.
    rest_1: f32,
    beta_2: f32,
    /// `1 - beta_2`.
    rest_2: f32,
    /// The factor of the parameter, from weight decay.
    keep: f32,
    lr: f32,
}

/// One Lion step. `rounded` is used only if `rounds` is set, and `factor` only if `scales` is.
#[cube(launch)]
#[allow(
    clippy::too_many_arguments,
    reason = "the buffers of the optimizer state"
)]
fn lion_kernel<G: Float, P: Float, M: Float, R: Float, N: Size>(
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

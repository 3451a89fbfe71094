use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;

use super::{cubes, factor_of, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::{AdamwState, AdamwStep};

pub(in crate::optimizer) fn adamw(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    let AdamwState { param, exp_avg, exp_avg_sq, rounded } = state;
    let [grad, param, exp_avg, exp_avg_sq] = [grad, param, exp_avg, exp_avg_sq].map(on_gpu);
    let [rounded, factor] = [rounded, factor].map(|x| x.map(on_gpu));
    let len = grad.meta.num_elements();
    let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(own);
    let AdamwStep { lr, beta_1, beta_2, epsilon, weight_decay, grad_factor, .. } = *step;
    let (rounds, scales) = (rounded.is_some(), factor.is_some());
    let rounded_arg = or_none(&rounded, &grad, DType::BF16);
    let factor = or_none(&factor, &grad, DType::F32);
    let dtypes = [grad.dtype, param.dtype, exp_avg.dtype, exp_avg_sq.dtype, rounded_arg.dtype];
    let lanes = lanes(len, &dtypes);
    adamw_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        exp_avg.clone().into_buffer_arg(),
        exp_avg_sq.clone().into_buffer_arg(),
        rounded_arg.into_buffer_arg(),
        factor.into_buffer_arg(),
        len / lanes,
        grad_factor as f32,
        beta_1 as f32,
        (1.0 - beta_1) as f32,
        beta_2 as f32,
        (1.0 - beta_2) as f32,
        (1.0 / step.correction(beta_2).sqrt()) as f32,
        epsilon as f32,
        (1.0 - lr * weight_decay) as f32,
        (lr / step.correction(beta_1)) as f32,
        rounds,
        scales,
        dtypes.map(dtype_to_storage_type),
    );
    AdamwState {
        param: wrap(param),
        exp_avg: wrap(exp_avg),
        exp_avg_sq: wrap(exp_avg_sq),
        rounded: rounded.map(wrap),
    }
}

/// `rounded` is looked at only if it `rounds`, `factor` only if it `scales`.
#[cube(launch)]
#[allow(clippy::too_many_arguments, reason = "the state and what the host knows of the step")]
fn adamw_kernel<G: Float, P: Float, M: Float, V: Float, R: Float, N: Size>(
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
        let (grad_factor, goes) = factor_of(grad_factor, factor, scales);
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

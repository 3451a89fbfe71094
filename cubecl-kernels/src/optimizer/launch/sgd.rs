use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;

use super::{cubes, factor_of, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::{SgdState, SgdStep};

/// The compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SgdVariant {
    decays: bool,
    /// Whether there is a momentum buffer.
    momentum: bool,
    nesterov: bool,
    /// Whether there is a rounded parameter.
    rounds: bool,
    /// Whether there is a factor on the device.
    scales: bool,
}

pub(in crate::optimizer) fn sgd(
    state: SgdState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &SgdStep,
) -> SgdState {
    let SgdState {
        param,
        momentum_buffer,
        rounded,
    } = state;
    let [grad, param] = [grad, param].map(on_gpu);
    let [momentum_buffer, rounded, factor] =
        [momentum_buffer, rounded, factor].map(|x| x.map(on_gpu));
    let len = grad.meta.num_elements();
    let param = own(param);
    let momentum_buffer = momentum_buffer.map(own);
    let SgdStep {
        lr,
        momentum,
        nesterov,
        weight_decay,
        grad_factor,
    } = *step;
    let flavor = SgdVariant {
        decays: weight_decay != 0.0,
        momentum: momentum_buffer.is_some(),
        nesterov,
        rounds: rounded.is_some(),
        scales: factor.is_some(),
    };
    let [buffer_arg, rounded_arg] =
        [&momentum_buffer, &rounded].map(|x| or_none(x, &grad, DType::BF16));
    let factor = or_none(&factor, &grad, DType::F32);
    let dtypes = [grad.dtype, param.dtype, buffer_arg.dtype, rounded_arg.dtype];
    let lanes = lanes(len, &dtypes);
    sgd_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        buffer_arg.into_buffer_arg(),
        rounded_arg.into_buffer_arg(),
        factor.into_buffer_arg(),
        len / lanes,
        SgdNumbersLaunch {
            grad_factor: grad_factor as f32,
            momentum: momentum as f32,
            weight_decay: weight_decay as f32,
            lr: lr as f32,
        },
        flavor,
        dtypes.map(dtype_to_storage_type),
    );
    SgdState {
        param: wrap(param),
        momentum_buffer: momentum_buffer.map(wrap),
        rounded: rounded.map(wrap),
    }
}

/// The numbers of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct SgdNumbers {
    grad_factor: f32,
    momentum: f32,
    weight_decay: f32,
    lr: f32,
}

/// One SGD step. Buffers that the variant does not use are not read.
#[cube(launch)]
#[allow(
    clippy::too_many_arguments,
    reason = "the buffers of the optimizer state"
)]
fn sgd_kernel<G: Float, P: Float, B: Float, R: Float, N: Size>(
    grad: &[Vector<G, N>],
    param: &mut [Vector<P, N>],
    momentum_buffer: &mut [Vector<B, N>],
    rounded: &mut [Vector<R, N>],
    factor: &[f32],
    vectors: usize,
    numbers: SgdNumbers,
    #[comptime] flavor: SgdVariant,
    #[define(G, P, B, R)] _dtypes: [ElemType; 4],
) {
    if ABSOLUTE_POS < vectors {
        let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, flavor.scales);
        let mut p = Vector::<f32, N>::cast_from(param[ABSOLUTE_POS]);
        if goes {
            let mut update = Vector::cast_from(grad[ABSOLUTE_POS]) * Vector::new(grad_factor);
            if comptime!(flavor.decays) {
                update += p * Vector::new(numbers.weight_decay);
            }
            if comptime!(flavor.momentum) {
                let old = Vector::<f32, N>::cast_from(momentum_buffer[ABSOLUTE_POS]);
                let buffer = old * Vector::new(numbers.momentum) + update;
                momentum_buffer[ABSOLUTE_POS] = Vector::cast_from(buffer);
                if comptime!(flavor.nesterov) {
                    update += buffer * Vector::new(numbers.momentum);
                } else {
                    update = buffer;
                }
            }
            p -= update * Vector::new(numbers.lr);
            param[ABSOLUTE_POS] = Vector::cast_from(p);
        }
        if comptime!(flavor.rounds) {
            rounded[ABSOLUTE_POS] = Vector::cast_from(p);
        }
    }
}

//! The optimizer steps by their definitions. The arithmetic is in f32, in the order of the kernels.

use burn::tensor::{DType, Tensor};

use super::options::{AdamwState, AdamwStep, LionState, LionStep, SgdState, SgdStep};

/// [`adamw`](crate::adamw), with a factor [`adamw_scaled`](crate::adamw_scaled), by its definition.
pub fn adamw(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    let AdamwStep {
        lr,
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
        grad_factor,
        ..
    } = *step;
    let Some(grad) = product(grad, grad_factor, factor) else {
        return AdamwState {
            rounded: round(&state.param, state.rounded),
            ..state
        };
    };
    let narrow = [&state.param, &state.exp_avg, &state.exp_avg_sq].map(|x| x.dtype());
    let wide = [state.param, state.exp_avg, state.exp_avg_sq].map(|x| x.cast(DType::F32));
    let [param, exp_avg, exp_avg_sq] = wide;
    let exp_avg = exp_avg.mul_scalar(beta_1) + grad.clone().mul_scalar(1.0 - beta_1);
    let exp_avg_sq = exp_avg_sq.mul_scalar(beta_2) + grad.square().mul_scalar(1.0 - beta_2);

    let root = exp_avg_sq
        .clone()
        .sqrt()
        .div_scalar(step.correction(beta_2).sqrt());
    let update = exp_avg.clone() / root.add_scalar(epsilon);
    let update = update.mul_scalar(lr / step.correction(beta_1));
    let param = decayed(param, lr * weight_decay) - update;
    AdamwState {
        rounded: round(&param, state.rounded),
        param: param.cast(narrow[0]),
        exp_avg: exp_avg.cast(narrow[1]),
        exp_avg_sq: exp_avg_sq.cast(narrow[2]),
    }
}

/// [`sgd`](crate::sgd), with a factor [`sgd_scaled`](crate::sgd_scaled), by its definition.
pub fn sgd(
    state: SgdState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &SgdStep,
) -> SgdState {
    let SgdStep {
        lr,
        momentum,
        nesterov,
        weight_decay,
        grad_factor,
    } = *step;
    let Some(grad) = product(grad, grad_factor, factor) else {
        return SgdState {
            rounded: round(&state.param, state.rounded),
            ..state
        };
    };
    let narrow = state.param.dtype();
    let param = state.param.cast(DType::F32);
    let grad = match weight_decay {
        0.0 => grad,
        decay => grad + param.clone().mul_scalar(decay),
    };
    let (update, momentum_buffer) = match state.momentum_buffer {
        None => (grad, None),
        Some(old) => {
            let buffer = old.clone().cast(DType::F32).mul_scalar(momentum) + grad.clone();
            let kept = buffer.clone().cast(old.dtype());
            let update = if nesterov {
                grad + buffer.mul_scalar(momentum)
            } else {
                buffer
            };
            (update, Some(kept))
        }
    };
    let param = param - update.mul_scalar(lr);
    let rounded = round(&param, state.rounded);
    SgdState {
        param: param.cast(narrow),
        momentum_buffer,
        rounded,
    }
}

/// [`lion`](crate::lion), with a factor [`lion_scaled`](crate::lion_scaled), by its definition.
pub fn lion(
    state: LionState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &LionStep,
) -> LionState {
    let LionStep {
        lr,
        beta_1,
        beta_2,
        weight_decay,
        grad_factor,
    } = *step;
    let Some(grad) = product(grad, grad_factor, factor) else {
        return LionState {
            rounded: round(&state.param, state.rounded),
            ..state
        };
    };
    let narrow = [&state.param, &state.exp_avg].map(|x| x.dtype());
    let [param, exp_avg] = [state.param, state.exp_avg].map(|x| x.cast(DType::F32));
    let mean = |beta: f64| exp_avg.clone().mul_scalar(beta) + grad.clone().mul_scalar(1.0 - beta);
    let param = decayed(param, lr * weight_decay) - sign(mean(beta_1)).mul_scalar(lr);
    LionState {
        rounded: round(&param, state.rounded),
        param: param.cast(narrow[0]),
        exp_avg: mean(beta_2).cast(narrow[1]),
    }
}

/// The gradient times its factors, in f32; `None` if the step is skipped.
fn product(grad: Tensor<1>, grad_factor: f64, factor: Option<Tensor<1>>) -> Option<Tensor<1>> {
    let grad = grad.cast(DType::F32);
    match factor {
        None if grad_factor == 1.0 => Some(grad),
        None => Some(grad.mul_scalar(grad_factor)),
        Some(factor) => {
            let goes: bool = factor.clone().is_finite().all().into_scalar();
            goes.then(|| grad * factor.mul_scalar(grad_factor))
        }
    }
}

fn decayed(param: Tensor<1>, decay: f64) -> Tensor<1> {
    if decay == 0.0 {
        param
    } else {
        param.mul_scalar(1.0 - decay)
    }
}

/// The sign: 1, -1, or `x` itself for 0 and NaN. (On some backends Burn's sign of NaN is 0.)
fn sign(x: Tensor<1>) -> Tensor<1> {
    let above = x.clone().greater_elem(0.0);
    let below = x.clone().lower_elem(0.0);
    x.mask_fill(above, 1.0).mask_fill(below, -1.0)
}

fn round(param: &Tensor<1>, old: Option<Tensor<1>>) -> Option<Tensor<1>> {
    old.map(|old| param.clone().cast(old.dtype()))
}

use super::{AdamwState, AdamwStep};
use burn::tensor::{DType, Tensor};

/// [`adamw`](crate::adamw), with a factor [`adamw_scaled`](crate::adamw_scaled), by its definition.
pub fn adamw(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    let AdamwStep { lr, beta_1, beta_2, epsilon, weight_decay, grad_factor, .. } = *step;
    let grad = grad.cast(DType::F32);
    let grad = if grad_factor == 1.0 { grad } else { grad.mul_scalar(grad_factor) };
    let grad = match factor {
        None => grad,
        Some(factor) if factor.clone().is_finite().all().into_scalar() => grad * factor,
        Some(_) => return round(state),
    };
    let narrow = [&state.param, &state.exp_avg, &state.exp_avg_sq].map(|x| x.dtype());
    let wide = [state.param, state.exp_avg, state.exp_avg_sq].map(|x| x.cast(DType::F32));
    let [param, exp_avg, exp_avg_sq] = wide;
    let exp_avg = exp_avg.mul_scalar(beta_1) + grad.clone().mul_scalar(1.0 - beta_1);
    let exp_avg_sq = exp_avg_sq.mul_scalar(beta_2) + grad.square().mul_scalar(1.0 - beta_2);

    let root = exp_avg_sq.clone().sqrt().div_scalar(step.correction(beta_2).sqrt());
    let update = exp_avg.clone() / root.add_scalar(epsilon);
    let decay = lr * weight_decay;
    let kept = if decay == 0.0 { param } else { param.mul_scalar(1.0 - decay) };
    let param = kept - update.mul_scalar(lr / step.correction(beta_1));
    let rounded = state.rounded.map(|old| param.clone().cast(old.dtype()));
    AdamwState {
        param: param.cast(narrow[0]),
        exp_avg: exp_avg.cast(narrow[1]),
        exp_avg_sq: exp_avg_sq.cast(narrow[2]),
        rounded,
    }
}

fn round(state: AdamwState) -> AdamwState {
    let rounded = state.rounded.map(|old| state.param.clone().cast(old.dtype()));
    AdamwState { rounded, ..state }
}

//! The SGD optimizer.

use burn::tensor::Tensor;

#[cfg(feature = "cuda")]
use super::launch;
use super::options::{SgdState, SgdStep};
use super::{checks, reference};
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// Returns the state after one step with `grad`, in f32, bf16 or f16.
///
/// On GPUs this is one kernel, in place where no other tensor shares the buffers; elsewhere it is
/// [`reference::sgd`](crate::reference::sgd). Autodiff graphs of the arguments are dropped; the
/// result is on the device without autodiff.
///
/// # Panics
/// If the lengths differ, a buffer has another dtype than these, a number of the step is out of
/// range, there is momentum without a buffer, or a buffer without momentum.
pub fn sgd(state: SgdState, grad: Tensor<1>, step: &SgdStep) -> SgdState {
    stepped("sgd", state, grad, None, step)
}

/// Like [`sgd`], with a further factor of the gradient that stays on the device. If `factor` is not
/// finite the step is skipped: the rounded parameter is then computed from the old one.
///
/// # Shapes
/// `factor: [1]`, f32, on the device of the other tensors
///
/// # Panics
/// As [`sgd`], or if `factor` has another shape, dtype or device.
pub fn sgd_scaled(state: SgdState, grad: Tensor<1>, factor: Tensor<1>, step: &SgdStep) -> SgdState {
    stepped("sgd_scaled", state, grad, Some(factor), step)
}

fn stepped(
    name: &str,
    state: SgdState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &SgdStep,
) -> SgdState {
    step.check(name);
    let SgdState {
        param,
        momentum_buffer,
        rounded,
    } = &state;
    let momentum = step.momentum;
    let is_kept = momentum_buffer.is_some();
    assert!(
        momentum == 0.0 || is_kept,
        "{name}: momentum {momentum} needs a momentum_buffer"
    );
    assert!(
        momentum > 0.0 || !is_kept,
        "{name}: a momentum_buffer is given, but the momentum is 0"
    );
    let buffer = momentum_buffer
        .as_ref()
        .map(|buffer| ("momentum_buffer", buffer));
    let kept = [("param", param)].into_iter().chain(buffer);
    checks::buffers(name, kept, rounded.as_ref(), &grad, factor.as_ref());
    let state = state.inner();
    let grad = grad.inner();
    let factor = factor.map(Tensor::inner);
    #[cfg(feature = "cuda")]
    if is_on_gpu(&grad) {
        return launch::sgd(state, grad, factor, step);
    }
    reference::sgd(state, grad, factor, step)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, s};
    use megaburn_autograd::testing::{assert_refused, constant, device, quantized, values};
    use rstest::rstest;

    use super::*;
    use crate::optimizer::factor;

    const STEP: SgdStep = SgdStep {
        lr: 0.1,
        momentum: 0.9,
        nesterov: false,
        weight_decay: 0.01,
        grad_factor: 0.5,
    };

    /// Three steps from a zero buffer, as torch documents them.
    #[rstest]
    #[case(STEP)]
    #[case(SgdStep { nesterov: true, ..STEP })]
    #[case(SgdStep { momentum: 0.0, ..STEP })]
    #[case(SgdStep { weight_decay: 0.0, ..STEP })]
    fn steps_are_torchs(#[case] step: SgdStep) {
        let param = constant([37]);
        let grads = [0; 3].map(|_| constant([37]));
        let momentum_buffer = (step.momentum > 0.0).then(|| param.zeros_like());
        let mut state = SgdState {
            param: param.clone(),
            momentum_buffer,
            rounded: None,
        };
        let mut params = values(param);
        let mut buffers = vec![0.0; 37];
        for (time, grad) in grads.into_iter().enumerate() {
            state = sgd(state, grad.clone(), &step);
            for ((p, b), g) in params.iter_mut().zip(&mut buffers).zip(values(grad)) {
                let g = 0.5 * g + step.weight_decay * *p;
                *b = if time == 0 { g } else { step.momentum * *b + g };
                let update = match (step.momentum, step.nesterov) {
                    (0.0, _) => g,
                    (momentum, true) => g + momentum * *b,
                    (_, false) => *b,
                };
                *p -= 0.1 * update;
            }
        }
        let close = |found: Tensor<1>, expected: &[f64]| {
            let found = values(found);
            found
                .iter()
                .zip(expected)
                .all(|(a, b)| (a - b).abs() < 1e-6 * b.abs().max(1.0))
        };
        assert!(close(state.param, &params));
        assert!(
            state
                .momentum_buffer
                .is_none_or(|buffer| close(buffer, &buffers))
        );
    }

    #[test]
    fn a_factor_multiplies_and_without_one_that_is_finite_nothing_steps() {
        let [param, grad, buffer] = [0; 3].map(|_| constant([37]));
        let state = SgdState {
            param: param.clone(),
            momentum_buffer: Some(buffer.clone()),
            rounded: Some(param.full_like(f32::NAN).cast(DType::BF16)),
        };
        let scaled = SgdStep {
            grad_factor: 0.25,
            ..STEP
        };
        let by_factor = sgd_scaled(state.clone(), grad.clone(), factor(2.0), &scaled);
        let skipped = sgd_scaled(state.clone(), grad.clone(), factor(f32::INFINITY), &scaled);
        let after = sgd(state, grad, &STEP);
        assert_eq!(values(by_factor.param), values(after.param.clone()));
        assert_eq!(values(skipped.momentum_buffer.unwrap()), values(buffer));
        assert_eq!(values(skipped.param), values(param.clone()));
        let rounded = [after.rounded.unwrap(), skipped.rounded.unwrap()].map(values);
        assert_eq!(
            rounded,
            [after.param, param].map(|x| values(x.cast(DType::BF16)))
        );
    }

    #[test]
    fn narrow_state_is_rounded_once_a_step() {
        let [param, grad, buffer] = [0; 3].map(|_| constant([37]).cast(DType::BF16));
        let after = |dtype| {
            let [param, grad, buffer] = [&param, &grad, &buffer].map(|x| x.clone().cast(dtype));
            let state = SgdState {
                param,
                momentum_buffer: Some(buffer),
                rounded: None,
            };
            let after = sgd(
                state,
                grad,
                &SgdStep {
                    nesterov: true,
                    ..STEP
                },
            );
            [after.param, after.momentum_buffer.unwrap()]
        };
        for (narrow, wide) in after(DType::BF16).into_iter().zip(after(DType::F32)) {
            assert_eq!(narrow.dtype(), DType::BF16);
            assert_eq!(values(narrow), values(wide.cast(DType::BF16)));
        }
    }

    #[test]
    fn views_are_read_and_what_is_differentiated_is_taken_without_its_graph() {
        let [param, grad, buffer] = [0; 3].map(|_| constant([40]).slice(s![1..;4]));
        let copy = |x: &Tensor<1>| Tensor::from_data(x.clone().into_data(), &device());
        let after = |param: Tensor<1>, buffer, grad| {
            let state = SgdState {
                param,
                momentum_buffer: Some(buffer),
                rounded: None,
            };
            let after = sgd(state, grad, &STEP);
            assert!(!after.param.device().is_autodiff());
            [after.param, after.momentum_buffer.unwrap()].map(values)
        };
        let copies = after(copy(&param), copy(&buffer), copy(&grad));
        assert_eq!(after(param.require_grad(), buffer, grad), copies);
    }

    #[test]
    fn nothing_is_stepped() {
        let none = || Tensor::<1>::empty([0], &device().inner());
        let state = SgdState {
            param: none(),
            momentum_buffer: Some(none()),
            rounded: Some(none()),
        };
        let after = sgd_scaled(state, none(), factor(1.0), &STEP);
        assert_eq!(
            (after.param.dims(), after.rounded.unwrap().dims()),
            ([0], [0])
        );
    }

    fn stepped_with(change: impl FnOnce(&mut SgdState, &mut Tensor<1>, &mut SgdStep)) {
        let [param, buffer, mut grad] = [0; 3].map(|_| constant([4]));
        let mut state = SgdState {
            param,
            momentum_buffer: Some(buffer),
            rounded: None,
        };
        let mut step = STEP;
        change(&mut state, &mut grad, &mut step);
        sgd(state, grad, &step);
    }

    fn scaled_with(factor: Tensor<1>) {
        let state = SgdState {
            param: constant([4]),
            momentum_buffer: Some(constant([4])),
            rounded: None,
        };
        sgd_scaled(state, constant([4]), factor, &STEP);
    }

    #[rstest]
    #[case(|| stepped_with(|_, grad, _| *grad = constant([1])), "param has 4 elements, but the gradient has 1")]
    #[case(|| stepped_with(|state, _, _| state.momentum_buffer = Some(constant([5]))), "momentum_buffer has 5 elements")]
    #[case(|| stepped_with(|state, _, _| state.rounded = Some(constant([1]))), "rounded has 1 elements")]
    #[case(|| stepped_with(|_, grad, _| *grad = quantized([4])), "sgd: the gradient is qfloat, not f32 or bf16 or f16")]
    #[case(|| stepped_with(|state, _, _| state.param = constant([4]).cast(DType::F64)), "param is f64")]
    #[case(|| stepped_with(|state, _, _| state.momentum_buffer = None), "sgd: momentum 0.9 needs a momentum_buffer")]
    #[case(|| stepped_with(|_, _, step| step.momentum = 0.0), "a momentum_buffer is given, but the momentum is 0")]
    #[case(|| stepped_with(|_, _, step| (step.nesterov, step.momentum) = (true, 0.0)), "nesterov needs a momentum greater than 0")]
    #[case(|| stepped_with(|_, _, step| step.lr = f64::NAN), "lr NaN is not")]
    #[case(|| stepped_with(|_, _, step| step.momentum = -0.1), "momentum -0.1 is not")]
    #[case(|| stepped_with(|_, _, step| step.weight_decay = f64::INFINITY), "weight_decay inf is not")]
    #[case(|| stepped_with(|_, _, step| step.grad_factor = f64::NAN), "grad_factor NaN is not")]
    #[case(|| scaled_with(constant([2])), "sgd_scaled: the factor on the device must be [1], not [2]")]
    #[case(|| scaled_with(constant([1]).cast(DType::BF16)), "the factor is bf16, not f32")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

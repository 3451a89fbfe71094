//! The Lion optimizer.

use burn::tensor::Tensor;

#[cfg(feature = "cuda")]
use super::launch;
use super::options::{LionState, LionStep};
use super::{checks, reference};
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// Returns the state after one step with `grad`, in f32, bf16 or f16.
///
/// On GPUs this is one kernel, in place where no other tensor shares the buffers; elsewhere it is
/// [`reference::lion`](crate::reference::lion). Autodiff graphs of the arguments are dropped; the
/// result is on the device without autodiff.
///
/// # Panics
/// If the lengths differ, a buffer has another dtype than these, or a number of the step is out of
/// range.
pub fn lion(state: LionState, grad: Tensor<1>, step: &LionStep) -> LionState {
    stepped("lion", state, grad, None, step)
}

/// Like [`lion`], with a further factor of the gradient that stays on the device. If `factor` is
/// not finite the step is skipped: the rounded parameter is then computed from the old one.
///
/// # Shapes
/// `factor: [1]`, f32, on the device of the other tensors
///
/// # Panics
/// As [`lion`], or if `factor` has another shape, dtype or device.
pub fn lion_scaled(
    state: LionState,
    grad: Tensor<1>,
    factor: Tensor<1>,
    step: &LionStep,
) -> LionState {
    stepped("lion_scaled", state, grad, Some(factor), step)
}

fn stepped(
    name: &str,
    state: LionState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &LionStep,
) -> LionState {
    step.check(name);
    let LionState {
        param,
        exp_avg,
        rounded,
    } = &state;
    let kept = [("param", param), ("exp_avg", exp_avg)];
    checks::buffers(name, kept, rounded.as_ref(), &grad, factor.as_ref());
    let state = state.inner();
    let grad = grad.inner();
    let factor = factor.map(Tensor::inner);
    #[cfg(feature = "cuda")]
    if is_on_gpu(&grad) {
        return launch::lion(state, grad, factor, step);
    }
    reference::lion(state, grad, factor, step)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, s};
    use megaburn_autograd::testing::{assert_refused, constant, device, quantized, values};
    use rstest::rstest;

    use super::*;
    use crate::optimizer::factor;

    const STEP: LionStep = LionStep {
        lr: 0.01,
        beta_1: 0.9,
        beta_2: 0.99,
        weight_decay: 0.1,
        grad_factor: 0.5,
    };

    #[rstest]
    #[case(STEP)]
    #[case(LionStep { weight_decay: 0.0, ..STEP })]
    fn steps_are_the_papers(#[case] step: LionStep) {
        // The means are as small as a gradient's share of them, so that the sign depends on both.
        let param = constant([37]);
        let exp_avg = constant([37]).mul_scalar(0.05);
        let mut expected: Vec<_> = values(param.clone())
            .into_iter()
            .zip(values(exp_avg.clone()))
            .collect();
        let mut state = LionState {
            param,
            exp_avg,
            rounded: None,
        };
        for grad in [0; 3].map(|_| constant([37])) {
            state = lion(state, grad.clone(), &step);
            for ((p, m), g) in expected.iter_mut().zip(values(grad)) {
                let g = 0.5 * g;
                let update = (0.9 * *m + 0.1 * g).signum();
                *p = *p * (1.0 - 0.01 * step.weight_decay) - 0.01 * update;
                *m = 0.99 * *m + 0.01 * g;
            }
        }
        let found = values(state.param).into_iter().zip(values(state.exp_avg));
        for ((found_p, found_m), (p, m)) in found.zip(expected) {
            assert!(
                (found_p - p).abs() < 1e-6 * p.abs().max(1.0),
                "{found_p}, not {p}"
            );
            assert!((found_m - m).abs() < 1e-6, "{found_m}, not {m}");
        }
    }

    #[test]
    fn the_sign_of_0_is_0_and_nan_does_not_vanish_in_one() {
        let of = |numbers: [f32; 5]| Tensor::<1>::from_floats(numbers, &device());
        let grad = of([0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let state = LionState {
            param: of([1.0; 5]),
            exp_avg: of([0.0; 5]),
            rounded: None,
        };
        let step = LionStep {
            lr: 0.5,
            weight_decay: 0.0,
            ..STEP
        };
        let after = lion(state, grad, &step);
        let [param, exp_avg] = [after.param, after.exp_avg].map(values);
        assert_eq!(
            [param[0], param[1], param[3], param[4]],
            [1.0, 1.0, 0.5, 1.5]
        );
        assert!(param[2].is_nan() && exp_avg[2].is_nan());
    }

    #[test]
    fn a_factor_multiplies_and_without_one_that_is_finite_nothing_steps() {
        let [param, grad, exp_avg] = [0; 3].map(|_| constant([37]));
        let state = LionState {
            param: param.clone(),
            exp_avg: exp_avg.clone(),
            rounded: Some(param.full_like(f32::NAN).cast(DType::BF16)),
        };
        let scaled = LionStep {
            grad_factor: 0.25,
            ..STEP
        };
        let by_factor = lion_scaled(state.clone(), grad.clone(), factor(2.0), &scaled);
        let skipped = lion_scaled(state.clone(), grad.clone(), factor(f32::NAN), &scaled);
        let after = lion(state, grad, &STEP);
        assert_eq!(values(by_factor.param), values(after.param.clone()));
        assert_eq!(values(by_factor.exp_avg), values(after.exp_avg));
        assert_eq!(values(skipped.exp_avg), values(exp_avg));
        assert_eq!(values(skipped.param), values(param.clone()));
        let rounded = [after.rounded.unwrap(), skipped.rounded.unwrap()].map(values);
        assert_eq!(
            rounded,
            [after.param, param].map(|x| values(x.cast(DType::BF16)))
        );
    }

    #[test]
    fn narrow_state_is_rounded_once_a_step() {
        let [param, grad, exp_avg] = [0; 3].map(|_| constant([37]).cast(DType::BF16));
        let after = |dtype| {
            let [param, grad, exp_avg] = [&param, &grad, &exp_avg].map(|x| x.clone().cast(dtype));
            let after = lion(
                LionState {
                    param,
                    exp_avg,
                    rounded: None,
                },
                grad,
                &STEP,
            );
            [after.param, after.exp_avg]
        };
        for (narrow, wide) in after(DType::BF16).into_iter().zip(after(DType::F32)) {
            assert_eq!(narrow.dtype(), DType::BF16);
            assert_eq!(values(narrow), values(wide.cast(DType::BF16)));
        }
    }

    #[test]
    fn views_are_read_and_what_is_differentiated_is_taken_without_its_graph() {
        let [param, grad, exp_avg] = [0; 3].map(|_| constant([40]).slice(s![1..;4]));
        let copy = |x: &Tensor<1>| Tensor::from_data(x.clone().into_data(), &device());
        let after = |param: Tensor<1>, exp_avg, grad| {
            let after = lion(
                LionState {
                    param,
                    exp_avg,
                    rounded: None,
                },
                grad,
                &STEP,
            );
            assert!(!after.param.device().is_autodiff());
            [after.param, after.exp_avg].map(values)
        };
        let copies = after(copy(&param), copy(&exp_avg), copy(&grad));
        assert_eq!(after(param.require_grad(), exp_avg, grad), copies);
    }

    #[test]
    fn nothing_is_stepped() {
        let none = || Tensor::<1>::empty([0], &device().inner());
        let state = LionState {
            param: none(),
            exp_avg: none(),
            rounded: Some(none()),
        };
        let after = lion_scaled(state, none(), factor(1.0), &STEP);
        assert_eq!(
            (after.param.dims(), after.rounded.unwrap().dims()),
            ([0], [0])
        );
    }

    fn stepped_with(change: impl FnOnce(&mut LionState, &mut Tensor<1>, &mut LionStep)) {
        let [param, exp_avg, mut grad] = [0; 3].map(|_| constant([4]));
        let mut state = LionState {
            param,
            exp_avg,
            rounded: None,
        };
        let mut step = STEP;
        change(&mut state, &mut grad, &mut step);
        lion(state, grad, &step);
    }

    fn scaled_with(factor: Tensor<1>) {
        let state = LionState {
            param: constant([4]),
            exp_avg: constant([4]),
            rounded: None,
        };
        lion_scaled(state, constant([4]), factor, &STEP);
    }

    #[rstest]
    #[case(|| stepped_with(|_, grad, _| *grad = constant([1])), "param has 4 elements, but the gradient has 1")]
    #[case(|| stepped_with(|state, _, _| state.exp_avg = constant([5])), "exp_avg has 5 elements")]
    #[case(|| stepped_with(|state, _, _| state.rounded = Some(constant([1]))), "rounded has 1 elements")]
    #[case(|| stepped_with(|_, grad, _| *grad = quantized([4])), "lion: the gradient is qfloat, not f32 or bf16 or f16")]
    #[case(|| stepped_with(|state, _, _| state.param = constant([4]).cast(DType::F64)), "param is f64")]
    #[case(|| stepped_with(|_, _, step| step.lr = f64::NAN), "lr NaN is not")]
    #[case(|| stepped_with(|_, _, step| step.beta_1 = 1.0), "beta_1 1 is not in [0, 1)")]
    #[case(|| stepped_with(|_, _, step| step.beta_2 = -0.1), "beta_2 -0.1 is not in [0, 1)")]
    #[case(|| stepped_with(|_, _, step| step.weight_decay = f64::INFINITY), "weight_decay inf is not")]
    #[case(|| stepped_with(|_, _, step| step.grad_factor = f64::NAN), "grad_factor NaN is not")]
    #[case(|| scaled_with(constant([2])), "lion_scaled: the factor on the device must be [1], not [2]")]
    #[case(|| scaled_with(constant([1]).cast(DType::BF16)), "the factor is bf16, not f32")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

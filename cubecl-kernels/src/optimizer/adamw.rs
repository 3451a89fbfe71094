//! The AdamW optimizer.

use burn::tensor::Tensor;

#[cfg(feature = "cuda")]
use super::launch;
use super::options::{AdamwState, AdamwStep};
use super::{checks, reference};
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;
use crate::quantized::largest_magnitude;

/// Returns the state after one step with `grad`, in f32, bf16 or f16.
///
/// On GPUs this is one kernel, in place where no other tensor shares the buffers; elsewhere it is
/// [`reference::adamw`](crate::reference::adamw). Autodiff graphs of the arguments are dropped; the
/// result is on the device without autodiff.
///
/// # Panics
/// If the lengths differ, a buffer has another dtype than these, or a number of the step is out of
/// range.
pub fn adamw(state: AdamwState, grad: Tensor<1>, step: &AdamwStep) -> AdamwState {
    stepped("adamw", state, grad, None, step)
}

/// Like [`adamw`], with a further factor of the gradient that stays on the device. If `factor` is
/// not finite the step is skipped: the rounded parameter is then computed from the old one.
///
/// # Shapes
/// `factor: [1]`, f32, on the device of the other tensors
///
/// # Panics
/// As [`adamw`], or if `factor` has another shape, dtype or device.
pub fn adamw_scaled(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Tensor<1>,
    step: &AdamwStep,
) -> AdamwState {
    stepped("adamw_scaled", state, grad, Some(factor), step)
}

/// [`adamw`], or with a factor [`adamw_scaled`], for several parameters and their gradients.
///
/// On GPUs one kernel updates all parameters whose buffers are f32 (except the rounded ones) and
/// consist of 16-byte vectors. The result has the order of `all`.
///
/// # Panics
/// As [`adamw`] and [`adamw_scaled`].
pub fn adamw_all(
    all: Vec<(AdamwState, Tensor<1>)>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> Vec<AdamwState> {
    let all = all_stepped("adamw_all", all, factor, step, false);
    all.into_iter().map(|(state, _)| state).collect()
}

/// [`adamw_all`] that also returns the largest magnitude of each new parameter, rounded if the parameter
/// is: `[1]` in f32, NaN if an element is NaN. It may be `None` on GPUs, where no kernel finds it for
/// buffers that are not as in `adamw_all`.
///
/// # Panics
/// As [`adamw_all`].
pub fn adamw_all_observed(
    all: Vec<(AdamwState, Tensor<1>)>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> Vec<(AdamwState, Option<Tensor<1>>)> {
    all_stepped("adamw_all_observed", all, factor, step, true)
}

fn all_stepped(
    name: &str,
    all: Vec<(AdamwState, Tensor<1>)>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
    finds_amaxes: bool,
) -> Vec<(AdamwState, Option<Tensor<1>>)> {
    step.check(name);
    all.iter()
        .for_each(|(state, grad)| check(name, state, grad, factor.as_ref()));
    let factor = factor.map(Tensor::inner);
    let all = all
        .into_iter()
        .map(|(state, grad)| (state.inner(), grad.inner()));
    #[cfg(feature = "cuda")]
    {
        let all: Vec<_> = all.collect();
        match all.first() {
            Some((_, grad)) if is_on_gpu(grad) => {
                launch::adamw_all(all, factor, step, finds_amaxes)
            }
            _ => each(all.into_iter(), factor, step, finds_amaxes),
        }
    }
    #[cfg(not(feature = "cuda"))]
    each(all, factor, step, finds_amaxes)
}

fn each(
    all: impl Iterator<Item = (AdamwState, Tensor<1>)>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
    finds_amaxes: bool,
) -> Vec<(AdamwState, Option<Tensor<1>>)> {
    all.map(|(state, grad)| {
        let new = reference::adamw(state, grad, factor.clone(), step);
        let param = new.rounded.as_ref().unwrap_or(&new.param);
        let amax = finds_amaxes.then(|| largest_magnitude(param.clone()));
        (new, amax)
    })
    .collect()
}

fn stepped(
    name: &str,
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    step.check(name);
    check(name, &state, &grad, factor.as_ref());
    let state = state.inner();
    let grad = grad.inner();
    let factor = factor.map(Tensor::inner);
    #[cfg(feature = "cuda")]
    if is_on_gpu(&grad) {
        return launch::adamw(state, grad, factor, step);
    }
    reference::adamw(state, grad, factor, step)
}

/// Panics if the buffers do not fit together.
fn check(name: &str, state: &AdamwState, grad: &Tensor<1>, factor: Option<&Tensor<1>>) {
    let AdamwState {
        param,
        exp_avg,
        exp_avg_sq,
        rounded,
    } = state;
    let kept = [
        ("param", param),
        ("exp_avg", exp_avg),
        ("exp_avg_sq", exp_avg_sq),
    ];
    checks::buffers(name, kept, rounded.as_ref(), grad, factor);
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, s};
    use megaburn_autograd::testing::{assert_refused, constant, device, quantized, values};
    use rstest::rstest;

    use super::*;
    use crate::optimizer::factor;

    const STEP: AdamwStep = AdamwStep {
        lr: 1e-2,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        grad_factor: 0.5,
        time: 1,
    };

    #[test]
    fn a_step_is_torchs() {
        let [param, grad, m, v] = [0; 4].map(|_| constant([37]));
        let v = v.abs();
        let step = AdamwStep { time: 7, ..STEP };
        let state = AdamwState {
            param: param.clone(),
            exp_avg: m.clone(),
            exp_avg_sq: v.clone(),
            rounded: Some(param.zeros_like().cast(DType::BF16)),
        };
        let scaled = AdamwStep {
            grad_factor: 0.25,
            ..step
        };
        let by_factor = adamw_scaled(state.clone(), grad.clone(), factor(2.0), &scaled);
        let other = AdamwState {
            rounded: None,
            ..state.clone()
        };
        let all = vec![(state.clone(), grad.clone()), (other, grad.clone() * 3.0)];
        let all = adamw_all(all, Some(factor(2.0)), &scaled);
        assert_eq!(
            values(all[0].param.clone()),
            values(by_factor.param.clone())
        );
        assert_ne!(
            values(all[1].param.clone()),
            values(by_factor.param.clone())
        );
        assert!(all.len() == 2 && all[1].rounded.is_none());
        let skipped = adamw_scaled(state.clone(), grad.clone(), factor(f32::NAN), &scaled);
        let after = adamw(state, grad.clone(), &step);
        assert_eq!(values(by_factor.param), values(after.param.clone()));
        assert_eq!(values(skipped.exp_avg), values(m.clone()));
        let rounded = [after.rounded.unwrap(), skipped.rounded.unwrap()].map(values);
        let whole = [after.param.clone(), param.clone()].map(|x| values(x.cast(DType::BF16)));
        assert_eq!(rounded, whole);
        let before = [param, grad, m, v].map(values);
        let after = [after.param, after.exp_avg, after.exp_avg_sq].map(values);
        for i in 0..37 {
            let [p, g, m, v] = [0, 1, 2, 3].map(|which| before[which][i]);
            let g = 0.5 * g;
            let m = 0.9 * m + 0.1 * g;
            let v = 0.95 * v + 0.05 * g * g;
            let root = (v / (1.0 - 0.95f64.powi(7))).sqrt() + 1e-8;
            let p = p * (1.0 - 1e-2 * 0.1) - 1e-2 * (m / (1.0 - 0.9f64.powi(7))) / root;
            for (found, expected) in [0, 1, 2].map(|which| after[which][i]).iter().zip([p, m, v]) {
                assert!((found - expected).abs() < 1e-6 * expected.abs().max(1.0));
            }
        }
    }

    #[test]
    fn the_found_magnitude_is_that_of_the_new_parameter() {
        let state = |rounded: Option<DType>| {
            let [param, exp_avg, exp_avg_sq] = [0; 3].map(|_| constant([37]));
            let rounded = rounded.map(|dtype| param.zeros_like().cast(dtype));
            AdamwState {
                param,
                exp_avg,
                exp_avg_sq: exp_avg_sq.abs(),
                rounded,
            }
        };
        let all = [None, Some(DType::BF16)].map(|of| (state(of), constant([37])));
        let all = adamw_all_observed(all.to_vec(), None, &STEP);
        let [(wide, of_wide), (both, of_rounded)] = all.try_into().expect("two states");
        let largest = |x: Tensor<1>| values(x.abs().max());
        assert_eq!(values(of_wide.unwrap()), largest(wide.param));
        assert_eq!(values(of_rounded.unwrap()), largest(both.rounded.unwrap()));
    }

    #[test]
    fn narrow_state_is_rounded_once_a_step() {
        let [param, grad, m, v] = [0; 4]
            .map(|_| constant([37]).cast(DType::BF16))
            .map(|x: Tensor<1>| x.abs());
        let step = AdamwStep { time: 3, ..STEP };
        let after = |dtype| {
            let [param, grad, exp_avg, exp_avg_sq] =
                [&param, &grad, &m, &v].map(|x| x.clone().cast(dtype));
            let state = AdamwState {
                param,
                exp_avg,
                exp_avg_sq,
                rounded: None,
            };
            let after = adamw(state, grad, &step);
            [after.param, after.exp_avg, after.exp_avg_sq]
        };
        for (narrow, wide) in after(DType::BF16).into_iter().zip(after(DType::F32)) {
            assert_eq!(narrow.dtype(), DType::BF16);
            assert_eq!(values(narrow), values(wide.cast(DType::BF16)));
        }
    }

    #[test]
    fn views_are_read_and_what_is_differentiated_is_taken_without_its_graph() {
        // A strided view: every fourth element, from the second on.
        let view = || constant([40]).slice(s![1..;4]);
        let [param, grad, m, v] = [0; 4].map(|_| view());
        let copy = |x: &Tensor<1>| Tensor::from_data(x.clone().into_data(), &device());
        let step = AdamwStep { time: 2, ..STEP };
        let after = |param: Tensor<1>, m: Tensor<1>, v: Tensor<1>, grad| {
            let state = AdamwState {
                param,
                exp_avg: m,
                exp_avg_sq: v.abs(),
                rounded: None,
            };
            let after = adamw(state, grad, &step);
            assert!(!after.param.device().is_autodiff());
            [after.param, after.exp_avg, after.exp_avg_sq].map(values)
        };
        let copies = after(copy(&param), copy(&m), copy(&v), copy(&grad));
        assert_eq!(after(param.require_grad(), m, v, grad), copies);
    }

    #[test]
    fn nothing_is_stepped() {
        let none = || Tensor::<1>::empty([0], &device().inner());
        let state = AdamwState {
            param: none(),
            exp_avg: none(),
            exp_avg_sq: none(),
            rounded: Some(none().cast(DType::BF16)),
        };
        let after = adamw_scaled(state, none(), factor(1.0), &STEP);
        assert_eq!(
            (after.param.dims(), after.rounded.unwrap().dims()),
            ([0], [0])
        );
    }

    fn stepped_with(change: impl FnOnce(&mut AdamwState, &mut Tensor<1>, &mut AdamwStep)) {
        let [param, exp_avg, exp_avg_sq, mut grad] = [0; 4].map(|_| constant([4]));
        let mut state = AdamwState {
            param,
            exp_avg,
            exp_avg_sq,
            rounded: None,
        };
        let mut step = STEP;
        change(&mut state, &mut grad, &mut step);
        adamw(state, grad, &step);
    }

    #[rstest]
    #[case(|| stepped_with(|_, grad, _| *grad = constant([1])), "param has 4 elements, but the gradient has 1")]
    #[case(|| stepped_with(|state, _, _| state.exp_avg_sq = constant([5])), "exp_avg_sq has 5 elements")]
    #[case(|| stepped_with(|state, _, _| state.rounded = Some(constant([1]))), "rounded has 1 elements")]
    #[case(|| stepped_with(|_, grad, _| *grad = quantized([4])), "adamw: the gradient is qfloat, not f32 or bf16 or f16")]
    #[case(|| stepped_with(|state, _, _| state.param = constant([4]).cast(DType::F64)), "param is f64")]
    #[case(|| stepped_with(|_, _, step| step.time = 0), "counted from 1")]
    #[case(|| stepped_with(|_, _, step| step.lr = f64::NAN), "lr NaN is not")]
    #[case(|| stepped_with(|_, _, step| step.beta_1 = 1.0), "beta_1 1 is not in [0, 1)")]
    #[case(|| stepped_with(|_, _, step| step.beta_2 = -0.1), "beta_2 -0.1 is not in [0, 1)")]
    #[case(|| stepped_with(|_, _, step| step.epsilon = -1e-8), "epsilon -0.00000001 is not")]
    #[case(|| stepped_with(|_, _, step| step.weight_decay = f64::INFINITY), "weight_decay inf is not")]
    #[case(|| stepped_with(|_, _, step| step.grad_factor = f64::NAN), "grad_factor NaN is not")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

//! What an optimizer does to flat buffers: AdamW, sums of squares, scaling, each in one pass on GPUs
//! and without the host's waiting for a number.

#[cfg(feature = "cuda")]
mod cube;
#[cfg(feature = "cuda")]
mod kernels;
pub(crate) mod reference;
mod state;

use burn::tensor::{DType, Tensor};

use crate::operands::{self, float};
pub use state::{AdamwState, AdamwStep};
use state::{check, kept, one};

/// The state after one step with `grad`, f32, bf16 or f16. On GPUs one kernel, in place where nobody
/// else holds the buffers; elsewhere [`reference::adamw`](crate::reference::adamw). Tensors of a device
/// with automatic differentiation are taken without their graph; the result is on the device without it.
///
/// # Panics
/// If the lengths differ, a buffer is of another dtype than those, or a number of the step is out of
/// its range.
pub fn adamw(state: AdamwState, grad: Tensor<1>, step: &AdamwStep) -> AdamwState {
    stepped("adamw", state, grad, None, step)
}

/// As [`adamw`] with a gradient that is multiplied with `factor` besides, which the host need not
/// know. Where `factor` is not finite the step does nothing: the rounded parameter is that of the old.
///
/// # Shapes
/// `factor: [1]`, f32, on the device of the others
///
/// # Panics
/// As [`adamw`], or if `factor` is anything else.
pub fn adamw_scaled(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Tensor<1>,
    step: &AdamwStep,
) -> AdamwState {
    stepped("adamw_scaled", state, grad, Some(factor), step)
}

fn stepped(
    name: &str,
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    check(name, &state, &grad, factor.as_ref(), step);
    let (state, grad, factor) = (state.inner(), grad.inner(), factor.map(Tensor::inner));
    #[cfg(feature = "cuda")]
    if is_on_gpu(&grad) {
        return cube::adamw(state, grad, factor, step);
    }
    reference::adamw(state, grad, factor, step)
}

/// `x * factor`, in place where nobody else holds `x`, and without its graph.
///
/// # Shapes
/// `x: [n]`, f32, bf16 or f16; `factor: [1]`, f32, on the same device
///
/// # Panics
/// If `x` or `factor` is anything else.
pub fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    operands::check("scaled", [kept("x", &x), one("scaled", &factor)]);
    let (x, factor) = (x.inner(), factor.inner());
    #[cfg(feature = "cuda")]
    if is_on_gpu(&x) {
        return cube::scaled(x, factor);
    }
    let dtype = x.dtype();
    (x.cast(DType::F32) * factor).cast(dtype)
}

/// The sum of what [`partial_sums_of_squares`] gave, of one tensor or of several behind each other: on
/// GPUs in f64, in a fixed order, read by nobody.
///
/// # Shapes
/// `[any]` to `[1]`, f32
///
/// # Panics
/// For sums of another dtype.
pub fn total(sums: Tensor<1>) -> Tensor<1> {
    operands::check("total", [float("sums", &sums).of(&[DType::F32])]);
    let sums = sums.inner();
    #[cfg(feature = "cuda")]
    if is_on_gpu(&sums) {
        return cube::total(sums);
    }
    sums.sum()
}

/// Sums of squares of stretches of `x`, to be added in f64: on GPUs some thousand, in a fixed order,
/// elsewhere one.
///
/// # Shapes
/// `[n]`, f32, bf16 or f16, to `[any]`, f32. A value that is not finite makes a sum so.
///
/// # Panics
/// For `x` of another dtype.
pub fn partial_sums_of_squares(x: Tensor<1>) -> Tensor<1> {
    operands::check("partial_sums_of_squares", [kept("x", &x)]);
    let x = x.inner();
    #[cfg(feature = "cuda")]
    if is_on_gpu(&x) {
        return cube::sums_of_squares(x);
    }
    x.cast(DType::F32).square().sum()
}

/// Whether a tensor is on a GPU, where reading it means waiting for everything before.
pub fn is_on_gpu<const D: usize>(x: &Tensor<D>) -> bool {
    #[cfg(feature = "cuda")]
    return x.clone().inner().try_into_primitive::<burn::backend::Cube>().is_ok();
    #[cfg(not(feature = "cuda"))]
    {
        let _ = x;
        false
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::s;
    use rstest::rstest;

    use super::*;
    use crate::testing::{assert_refused, constant, device, quantized, values};

    const STEP: AdamwStep = AdamwStep {
        lr: 1e-2,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        grad_factor: 0.5,
        time: 1,
    };

    fn factor(value: f32) -> Tensor<1> {
        Tensor::from_floats([value], &device())
    }

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
        let scaled = AdamwStep { grad_factor: 0.25, ..step };
        let by_factor = adamw_scaled(state.clone(), grad.clone(), factor(2.0), &scaled);
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
            let (m, v) = (0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g);
            let root = (v / (1.0 - 0.95f64.powi(7))).sqrt() + 1e-8;
            let p = p * (1.0 - 1e-2 * 0.1) - 1e-2 * (m / (1.0 - 0.9f64.powi(7))) / root;
            for (found, expected) in [0, 1, 2].map(|which| after[which][i]).iter().zip([p, m, v]) {
                assert!((found - expected).abs() < 1e-6 * expected.abs().max(1.0));
            }
        }
    }

    #[test]
    fn narrow_state_is_rounded_once_a_step() {
        let [param, grad, m, v] =
            [0; 4].map(|_| constant([37]).cast(DType::BF16)).map(|x: Tensor<1>| x.abs());
        let step = AdamwStep { time: 3, ..STEP };
        let after = |dtype| {
            let [param, grad, exp_avg, exp_avg_sq] =
                [&param, &grad, &m, &v].map(|x| x.clone().cast(dtype));
            let state = AdamwState { param, exp_avg, exp_avg_sq, rounded: None };
            let after = adamw(state, grad, &step);
            [after.param, after.exp_avg, after.exp_avg_sq]
        };
        for (narrow, wide) in after(DType::BF16).into_iter().zip(after(DType::F32)) {
            assert_eq!(narrow.dtype(), DType::BF16);
            assert_eq!(values(narrow), values(wide.cast(DType::BF16)));
        }
    }

    #[test]
    fn squares_are_summed_and_nan_is_kept() {
        let x = constant([1000]);
        let expected: f64 = values(x.clone()).iter().map(|x| x * x).sum();
        let found: f64 = values(partial_sums_of_squares(x.clone())).iter().sum();
        assert!((found - expected).abs() < 1e-4 * expected);
        let bad = x.slice_fill(10..11, f32::NAN);
        assert!(values(partial_sums_of_squares(bad)).iter().sum::<f64>().is_nan());
        assert!(!is_on_gpu(&constant([3])));
        assert_eq!(values(total(factor(3.0).repeat(&[4]))), [12.0]);
        assert_eq!(values(super::scaled(factor(3.0), factor(-2.0))), [-6.0]);
    }

    #[test]
    fn views_are_read_and_what_is_differentiated_is_taken_without_its_graph() {
        // Every fourth of some, from the second on.
        let view = || constant([40]).slice(s![1..;4]);
        let [param, grad, m, v] = [0; 4].map(|_| view());
        let copy = |x: &Tensor<1>| Tensor::from_data(x.clone().into_data(), &device());
        let step = AdamwStep { time: 2, ..STEP };
        let after = |param: Tensor<1>, m: Tensor<1>, v: Tensor<1>, grad| {
            let state = AdamwState { param, exp_avg: m, exp_avg_sq: v.abs(), rounded: None };
            let after = adamw(state, grad, &step);
            assert!(!after.param.device().is_autodiff());
            [after.param, after.exp_avg, after.exp_avg_sq].map(values)
        };
        let copies = after(copy(&param), copy(&m), copy(&v), copy(&grad));
        assert_eq!(after(param.require_grad(), m, v, grad.clone()), copies);
        let squares = |x| values(partial_sums_of_squares(x));
        assert_eq!(squares(grad.clone()), squares(copy(&grad)));
        let twice = |x| values(scaled(x, factor(2.0)));
        assert_eq!(twice(grad.clone()), twice(copy(&grad)));
        assert_eq!(values(total(grad.clone())), values(total(copy(&grad))));
    }

    #[test]
    fn nothing_is_stepped_and_its_squares_are_zero() {
        let none = || Tensor::<1>::empty([0], &device().inner());
        let state = AdamwState {
            param: none(),
            exp_avg: none(),
            exp_avg_sq: none(),
            rounded: Some(none().cast(DType::BF16)),
        };
        let after = adamw_scaled(state, none(), factor(1.0), &STEP);
        assert_eq!((after.param.dims(), after.rounded.unwrap().dims()), ([0], [0]));
        assert_eq!(scaled(none(), factor(1.0)).dims(), [0]);
        assert_eq!(values(total(partial_sums_of_squares(none()))), [0.0]);
        assert_eq!(values(total(none())), [0.0]);
    }

    fn stepped_with(change: impl FnOnce(&mut AdamwState, &mut Tensor<1>, &mut AdamwStep)) {
        let [param, exp_avg, exp_avg_sq, mut grad] = [0; 4].map(|_| constant([4]));
        let mut state = AdamwState { param, exp_avg, exp_avg_sq, rounded: None };
        let mut step = STEP;
        change(&mut state, &mut grad, &mut step);
        adamw(state, grad, &step);
    }

    #[rstest]
    #[case(|| stepped_with(|_, grad, _| *grad = constant([1])), "param has 4 elements, the gradient 1")]
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
    #[case(|| drop(scaled(constant([3]), constant([2]))), "scaled: a factor on the device is one f32, not [2]")]
    #[case(|| drop(scaled(constant([3]), constant([1]).cast(DType::BF16))), "the factor is bf16, not f32")]
    #[case(|| drop(scaled(constant([3]).cast(DType::F64), factor(1.0))), "scaled: x is f64")]
    #[case(|| drop(total(constant([3]).cast(DType::F16))), "total: sums is f16, not f32")]
    #[case(|| drop(partial_sums_of_squares(quantized([4]))), "partial_sums_of_squares: x is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}

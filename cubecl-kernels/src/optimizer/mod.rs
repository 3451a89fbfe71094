//! What an optimizer does to flat buffers: AdamW, sums of squares, scaling, each in one pass on GPUs
//! and without the host's waiting for a number.

#[cfg(feature = "cuda")]
mod cube;
#[cfg(feature = "cuda")]
mod kernels;
pub(crate) mod reference;

use burn::tensor::{DType, Tensor};

/// One step of AdamW, as `torch.optim.AdamW` defines it: bias correction of both moments, epsilon
/// outside the root, decay decoupled.
///
/// Source: Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta_1: f64,
    /// Decay of the mean of squared gradients.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// What the gradient is multiplied with first: one over the tokens, a clip coefficient.
    pub grad_factor: f64,
    /// The number of this step, from 1.
    pub time: u64,
}

impl AdamwStep {
    /// `1 - beta^time`.
    fn correction(&self, beta: f64) -> f64 {
        1.0 - beta.powf(self.time as f64)
    }
}

/// A parameter and the state that AdamW keeps of it, each of its own dtype: f32, bf16 or f16. The
/// arithmetic is in f32 whatever they are; what is kept is rounded to nearest.
///
/// # Shapes
/// `[n]` each.
#[derive(Clone, Debug)]
pub struct AdamwState {
    /// The parameter, or its master.
    pub param: Tensor<1>,
    /// The mean of gradients.
    pub exp_avg: Tensor<1>,
    /// The mean of squared gradients.
    pub exp_avg_sq: Tensor<1>,
    /// If given, becomes the new parameter rounded to this tensor's dtype; what it holds before does not
    /// matter.
    pub rounded: Option<Tensor<1>>,
}

/// The state after one step with `grad`, f32, bf16 or f16. On GPUs one kernel, in place where nobody else holds the
/// buffers; elsewhere [`reference::adamw`](crate::reference::adamw).
///
/// # Panics
/// If the lengths differ or a buffer is of another dtype than those.
pub fn adamw(state: AdamwState, grad: Tensor<1>, step: &AdamwStep) -> AdamwState {
    #[cfg(feature = "cuda")]
    if is_on_gpu(&grad) {
        return cube::adamw(state, grad, None, step);
    }
    reference::adamw(state, grad, None, step)
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
    check_factor(&factor);
    #[cfg(feature = "cuda")]
    if is_on_gpu(&grad) {
        return cube::adamw(state, grad, Some(factor), step);
    }
    reference::adamw(state, grad, Some(factor), step)
}

/// A factor on the device is one f32.
fn check_factor(factor: &Tensor<1>) {
    assert!(
        factor.dims() == [1] && factor.dtype() == DType::F32,
        "a factor on the device is one f32, not {:?} {}",
        factor.dims(),
        factor.dtype().name()
    );
}

/// `x * factor`, in place where nobody else holds `x`.
///
/// # Shapes
/// `x: [n]`, f32, bf16 or f16; `factor: [1]`, f32, on the same device
///
/// # Panics
/// If `factor` is anything else.
pub fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    check_factor(&factor);
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
pub fn total(sums: Tensor<1>) -> Tensor<1> {
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
pub fn partial_sums_of_squares(x: Tensor<1>) -> Tensor<1> {
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
    use super::*;
    use crate::testing::{constant, device, values};

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
    #[should_panic(expected = "one f32, not [2] f32")]
    fn a_factor_of_two_numbers_is_refused() {
        scaled(constant([3]), constant([2]));
    }
}

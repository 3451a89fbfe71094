use burn::tensor::{DType, Tensor};

use crate::operands::{self, Operand, float};

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
    pub(super) fn correction(&self, beta: f64) -> f64 {
        1.0 - beta.powf(self.time as f64)
    }

    /// Panics if a number is out of the range of `torch.optim.AdamW`.
    fn check(&self, name: &str) {
        let Self { lr, beta_1, beta_2, epsilon, weight_decay, grad_factor, time } = *self;
        for (what, number) in [("lr", lr), ("epsilon", epsilon), ("weight_decay", weight_decay)] {
            let fits = number >= 0.0 && number.is_finite();
            assert!(fits, "{name}: {what} {number} is not a finite number from 0 on");
        }
        for (what, beta) in [("beta_1", beta_1), ("beta_2", beta_2)] {
            assert!((0.0..1.0).contains(&beta), "{name}: {what} {beta} is not in [0, 1)");
        }
        assert!(
            grad_factor.is_finite(),
            "{name}: grad_factor {grad_factor} is not a finite number"
        );
        assert!(time > 0, "{name}: steps are counted from 1, the time is 0");
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

impl AdamwState {
    /// The same without a graph.
    pub(super) fn inner(self) -> Self {
        let Self { param, exp_avg, exp_avg_sq, rounded } = self;
        let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(Tensor::inner);
        Self { param, exp_avg, exp_avg_sq, rounded: rounded.map(Tensor::inner) }
    }
}

/// A buffer of the optimizer, in f32 or narrower.
pub(super) fn kept(name: &'static str, x: &Tensor<1>) -> Operand {
    float(name, x).of(&[DType::F32, DType::BF16, DType::F16])
}

/// A factor on the device, one f32. Panics if it is not one.
pub(super) fn one(name: &str, factor: &Tensor<1>) -> Operand {
    let dims = factor.dims();
    assert!(dims == [1], "{name}: a factor on the device is one f32, not {dims:?}");
    float("the factor", factor).of(&[DType::F32])
}

/// Panics unless a step can be made with these.
pub(super) fn check(
    name: &str,
    state: &AdamwState,
    grad: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    step: &AdamwStep,
) {
    step.check(name);
    let AdamwState { param, exp_avg, exp_avg_sq, rounded } = state;
    let buffers = [("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    let rounded = rounded.as_ref().map(|rounded| ("rounded", rounded));
    let buffers = buffers.into_iter().chain(rounded);
    let operands = buffers.clone().map(|(what, x)| kept(what, x));
    let factor = factor.map(|factor| one(name, factor));
    operands::check(name, [kept("the gradient", grad)].into_iter().chain(operands).chain(factor));
    let [len] = grad.dims();
    for (what, x) in buffers {
        let [found] = x.dims();
        assert_eq!(found, len, "{name}: {what} has {found} elements, the gradient {len}");
    }
}

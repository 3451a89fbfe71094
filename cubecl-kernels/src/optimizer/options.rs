//! The numbers of the steps of each optimizer, and the states that the steps change.

use burn::tensor::Tensor;

use super::checks;

/// The numbers of one AdamW step, as `torch.optim.AdamW` defines it: bias correction of both
/// moments, epsilon outside the root, decoupled weight decay.
///
/// Source: Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the mean of gradients.
    pub beta_1: f64,
    /// Decay rate of the mean of squared gradients.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor of the gradient: one over the number of tokens, times the clip coefficient.
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
    pub(super) fn check(&self, name: &str) {
        let Self {
            lr,
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            grad_factor,
            time,
        } = *self;
        checks::non_negative(
            name,
            [
                ("lr", lr),
                ("epsilon", epsilon),
                ("weight_decay", weight_decay),
            ],
        );
        checks::betas(name, [("beta_1", beta_1), ("beta_2", beta_2)]);
        checks::finite(name, ("grad_factor", grad_factor));
        assert!(time > 0, "{name}: time is 0, but steps are counted from 1");
    }
}

/// A parameter and its AdamW state. Each tensor has its own dtype: f32, bf16 or f16. The arithmetic
/// is always in f32; results are rounded to nearest.
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
    /// If given, the buffer for the new parameter, rounded to the buffer's dtype; its contents are
    /// ignored. On GPUs its memory is overwritten **even if other tensors share it**
    /// ([`bf16_out_slice`](crate::bf16_out_slice)).
    pub rounded: Option<Tensor<1>>,
}

impl AdamwState {
    /// Returns the same state without autodiff graphs.
    pub(super) fn inner(self) -> Self {
        let Self {
            param,
            exp_avg,
            exp_avg_sq,
            rounded,
        } = self;
        let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(Tensor::inner);
        Self {
            param,
            exp_avg,
            exp_avg_sq,
            rounded: rounded.map(Tensor::inner),
        }
    }
}

/// The numbers of one Lion step. The update is the sign of a mean of gradients; the stored mean has
/// a decay rate of its own, and weight decay is decoupled. The sign of 0 is 0, the sign of NaN is
/// NaN.
///
/// Source: Chen et al. 2023, <https://arxiv.org/abs/2302.06675>.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionStep {
    /// Learning rate: the distance by which a step moves each number.
    pub lr: f64,
    /// Decay rate of the mean whose sign is the update.
    pub beta_1: f64,
    /// Decay rate of the stored mean.
    pub beta_2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor of the gradient: one over the number of tokens, times the clip coefficient.
    pub grad_factor: f64,
}

impl LionStep {
    /// Panics if a number is out of range.
    pub(super) fn check(&self, name: &str) {
        let Self {
            lr,
            beta_1,
            beta_2,
            weight_decay,
            grad_factor,
        } = *self;
        checks::non_negative(name, [("lr", lr), ("weight_decay", weight_decay)]);
        checks::betas(name, [("beta_1", beta_1), ("beta_2", beta_2)]);
        checks::finite(name, ("grad_factor", grad_factor));
    }
}

/// A parameter and the mean of its gradients. Each tensor has its own dtype: f32, bf16 or f16. The
/// arithmetic is always in f32; results are rounded to nearest.
///
/// # Shapes
/// `[n]` each.
#[derive(Clone, Debug)]
pub struct LionState {
    /// The parameter, or its master.
    pub param: Tensor<1>,
    /// The mean of gradients.
    pub exp_avg: Tensor<1>,
    /// If given, the buffer for the new parameter, rounded to the buffer's dtype; its contents are
    /// ignored. On GPUs its memory is overwritten **even if other tensors share it**
    /// ([`bf16_out_slice`](crate::bf16_out_slice)).
    pub rounded: Option<Tensor<1>>,
}

impl LionState {
    /// Returns the same state without autodiff graphs.
    pub(super) fn inner(self) -> Self {
        let Self {
            param,
            exp_avg,
            rounded,
        } = self;
        let [param, exp_avg] = [param, exp_avg].map(Tensor::inner);
        Self {
            param,
            exp_avg,
            rounded: rounded.map(Tensor::inner),
        }
    }
}

/// The numbers of one step of stochastic gradient descent, as `torch.optim.SGD` without dampening
/// defines it: weight decay is added to the gradient, and `buffer = momentum * buffer + gradient`.
///
/// Source: Sutskever et al. 2013, <https://proceedings.mlr.press/v28/sutskever13.html>.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the momentum buffer; with 0 there is no buffer.
    pub momentum: f64,
    /// Whether to step with the gradient plus `momentum` times the buffer instead of with the
    /// buffer.
    pub nesterov: bool,
    /// Coupled weight decay: this times the parameter is added to the gradient.
    pub weight_decay: f64,
    /// Factor of the gradient: one over the number of tokens, times the clip coefficient.
    pub grad_factor: f64,
}

impl SgdStep {
    /// Panics if a number is out of the range of `torch.optim.SGD`.
    pub(super) fn check(&self, name: &str) {
        let Self {
            lr,
            momentum,
            nesterov,
            weight_decay,
            grad_factor,
        } = *self;
        let non_negative = [
            ("lr", lr),
            ("momentum", momentum),
            ("weight_decay", weight_decay),
        ];
        checks::non_negative(name, non_negative);
        checks::finite(name, ("grad_factor", grad_factor));
        assert!(
            !nesterov || momentum > 0.0,
            "{name}: nesterov needs a momentum greater than 0"
        );
    }
}

/// A parameter and its momentum. Each tensor has its own dtype: f32, bf16 or f16. The arithmetic is
/// always in f32; results are rounded to nearest.
///
/// # Shapes
/// `[n]` each.
#[derive(Clone, Debug)]
pub struct SgdState {
    /// The parameter, or its master.
    pub param: Tensor<1>,
    /// The decaying sum of gradients, zeros before the first step; `None` with momentum 0.
    pub momentum_buffer: Option<Tensor<1>>,
    /// If given, the buffer for the new parameter, rounded to the buffer's dtype; its contents are
    /// ignored. On GPUs its memory is overwritten **even if other tensors share it**
    /// ([`bf16_out_slice`](crate::bf16_out_slice)).
    pub rounded: Option<Tensor<1>>,
}

impl SgdState {
    /// Returns the same state without autodiff graphs.
    pub(super) fn inner(self) -> Self {
        let Self {
            param,
            momentum_buffer,
            rounded,
        } = self;
        let [momentum_buffer, rounded] = [momentum_buffer, rounded].map(|x| x.map(Tensor::inner));
        Self {
            param: param.inner(),
            momentum_buffer,
            rounded,
        }
    }
}

use burn::{config::Config, tensor::FloatDType};
use megaburn_kernels::{SgdState, SgdStep, sgd, sgd_scaled};

use super::{ParamState, Rule, UpdateInputs, check, check_decay, check_dtype, check_weight_decay};
use crate::{Moment, OptimError, Optimizer, Rates, Sharding};

/// Gradient descent with momentum, as `torch.optim.SGD` has it: without dampening, the decay added to
/// the gradient. The learning rate is given to each step.
#[derive(Config, Debug, PartialEq)]
pub struct SgdConfig {
    /// Decay of the sum of gradients; 0 keeps none.
    #[config(default = 0.9)]
    pub momentum: f64,
    /// Whether a step looks ahead by the gradient it has (Nesterov).
    #[config(default = false)]
    pub nesterov: bool,
    /// Weight decay, of parameters of two dimensions or more.
    #[config(default = 0.0)]
    pub weight_decay: f64,
    /// What is updated, as [`AdamWConfig::main_params`](crate::AdamWConfig::main_params).
    #[config(default = "FloatDType::F32")]
    pub main_params: FloatDType,
    /// In what the sum of gradients is kept. In bf16 a step changes it only by more than 1/512 of itself.
    #[config(default = "FloatDType::F32")]
    pub momentum_buffer: FloatDType,
}

impl SgdConfig {
    /// The optimizer, before its first step; of its state a rank keeps what `sharding` says.
    ///
    /// # Errors
    /// A momentum outside `[0, 1)`, Nesterov's without one, a negative weight decay, state in f16 or f64.
    pub fn init(&self, sharding: &Sharding) -> Result<Optimizer, OptimError> {
        check_decay("momentum", self.momentum)?;
        let ahead = !self.nesterov || self.momentum > 0.0;
        check(
            "momentum",
            self.momentum,
            ahead,
            "more than 0 with Nesterov's look ahead",
        )?;
        check_weight_decay(self.weight_decay)?;
        check_dtype("main_params", self.main_params)?;
        check_dtype("momentum_buffer", self.momentum_buffer)?;
        Ok(Optimizer::new(Rule::Sgd(self.clone()), sharding))
    }

    pub(super) fn moments(&self) -> Vec<(Moment, FloatDType)> {
        if self.momentum > 0.0 {
            vec![(Moment::MomentumBuffer, self.momentum_buffer)]
        } else {
            Vec::new()
        }
    }

    pub(super) fn update(&self, mut old: ParamState, force: UpdateInputs) -> ParamState {
        let Self {
            momentum, nesterov, ..
        } = *self;
        let UpdateInputs {
            grad,
            factor: grad_factor,
            factor_on_gpu,
            rates,
            ..
        } = force;
        let Rates { lr, weight_decay } = rates;
        let step = SgdStep {
            lr,
            momentum,
            nesterov,
            weight_decay,
            grad_factor,
        };
        let momentum_buffer = old.moments.remove(&Moment::MomentumBuffer);
        let old = SgdState {
            param: old.param,
            momentum_buffer,
            rounded: old.rounded,
        };
        let SgdState {
            param,
            momentum_buffer,
            rounded,
        } = match factor_on_gpu {
            Some(factor) => sgd_scaled(old, grad, factor, &step),
            None => sgd(old, grad, &step),
        };
        let moments = momentum_buffer.map(|buffer| (Moment::MomentumBuffer, buffer));
        ParamState {
            param,
            rounded,
            moments: moments.into_iter().collect(),
        }
    }
}

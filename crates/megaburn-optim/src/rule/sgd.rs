use burn::tensor::FloatDType;
use megaburn_kernels::{SgdState, SgdStep, sgd, sgd_scaled};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ParamState, Rates, Rule, UpdateInputs, check, check_decay, check_weight_decay};
use crate::{
    error::OptimError,
    moment::Moment,
    optimizer::Optimizer,
    sharding::Sharding,
    state_dtype::{StateDtype, check_dtype},
};

/// SGD with momentum as in `torch.optim.SGD`: no dampening, and weight decay is added to the
/// gradient. The learning rate is an argument of each step.
///
/// In a configuration file this is the section `[optimizer.sgd]`, without the fields that all
/// optimizers share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct SgdConfig {
    /// Decay of the momentum, from 0 to below 1; 0 keeps no momentum.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub momentum: f64,
    /// Whether to use Nesterov momentum; it needs `momentum` above 0.
    pub nesterov: bool,
    /// Weight decay, for parameters of two or more dimensions.
    #[serde(skip)]
    pub weight_decay: f64,
    /// Type of what is updated, as in
    /// [`AdamWConfig::main_params`](crate::AdamWConfig::main_params).
    #[serde(skip)]
    pub main_params: FloatDType,
    /// Type of the stored sum of gradients. In bf16, a step changes the sum only by more than 1/512
    /// of itself.
    #[serde(skip)]
    pub momentum_buffer: StateDtype,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.0,
            main_params: FloatDType::F32,
            momentum_buffer: StateDtype::F32,
        }
    }
}

impl SgdConfig {
    /// The optimizer before its first step. A rank keeps the part of its state that `sharding`
    /// assigns to it.
    ///
    /// # Errors
    /// The momentum is outside `[0, 1)`, Nesterov is set without momentum, the weight decay is
    /// negative, or the type of main parameters is f16 or f64.
    pub fn init(&self, sharding: &Sharding) -> Result<Optimizer, OptimError> {
        check_decay("momentum", self.momentum)?;
        let ahead = !self.nesterov || self.momentum > 0.0;
        check(
            "momentum",
            self.momentum,
            ahead,
            "more than 0 with Nesterov momentum",
        )?;
        check_weight_decay(self.weight_decay)?;
        check_dtype("main_params", self.main_params)?;
        Ok(Optimizer::new(Rule::Sgd(self.clone()), sharding))
    }

    pub(super) fn moments(&self) -> Vec<(Moment, StateDtype)> {
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
            amax: None,
        }
    }
}

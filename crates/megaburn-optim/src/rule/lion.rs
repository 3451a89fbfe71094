use burn::tensor::FloatDType;
use megaburn_kernels::{LionState, LionStep, lion, lion_scaled};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ParamState, Rates, Rule, UpdateInputs, check_decay, check_weight_decay};
use crate::{
    error::OptimError,
    moment::Moment,
    optimizer::Optimizer,
    sharding::Sharding,
    state_dtype::{StateDtype, check_dtype},
};

/// Lion: each element moves by the learning rate, in the direction of the sign of a mean of
/// gradients. Weight decay is decoupled. Compared with AdamW, Lion needs a learning rate three to
/// ten times smaller, and a weight decay larger by the same factor. The learning rate is an
/// argument of each step.
///
/// In a configuration file this is the section `[optimizer.lion]`, without the fields that all
/// optimizers share.
///
/// Source: Chen et al. 2023, <https://arxiv.org/abs/2302.06675>.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct LionConfig {
    /// Weight of the mean of gradients in the direction whose sign is taken, from 0 to below 1.
    #[serde(rename = "beta1")]
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub beta_1: f64,
    /// Decay of the mean of gradients, from 0 to below 1.
    #[serde(rename = "beta2")]
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub beta_2: f64,
    /// Decoupled weight decay, for parameters of two or more dimensions.
    #[serde(skip)]
    pub weight_decay: f64,
    /// Type of what is updated, as in
    /// [`AdamWConfig::main_params`](crate::AdamWConfig::main_params).
    #[serde(skip)]
    pub main_params: FloatDType,
    /// Type of the stored mean of gradients. In bf16, a step changes the mean only by more than
    /// 1/512 of itself: with `beta_2` above 0.998 it would not decay.
    #[serde(skip)]
    pub exp_avg: StateDtype,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.99,
            weight_decay: 0.1,
            main_params: FloatDType::F32,
            exp_avg: StateDtype::F32,
        }
    }
}

impl LionConfig {
    /// The optimizer before its first step. A rank keeps the part of its state that `sharding`
    /// assigns to it.
    ///
    /// # Errors
    /// A beta is outside `[0, 1)`, the weight decay is negative, or the type of main parameters is f16 or f64.
    pub fn init(&self, sharding: &Sharding) -> Result<Optimizer, OptimError> {
        check_decay("beta_1", self.beta_1)?;
        check_decay("beta_2", self.beta_2)?;
        check_weight_decay(self.weight_decay)?;
        check_dtype("main_params", self.main_params)?;
        Ok(Optimizer::new(Rule::Lion(self.clone()), sharding))
    }

    pub(super) fn moments(&self) -> Vec<(Moment, StateDtype)> {
        vec![(Moment::ExpAvg, self.exp_avg)]
    }

    pub(super) fn update(&self, mut old: ParamState, force: UpdateInputs) -> ParamState {
        let Self { beta_1, beta_2, .. } = *self;
        let UpdateInputs {
            grad,
            factor: grad_factor,
            factor_on_gpu,
            rates,
            ..
        } = force;
        let Rates { lr, weight_decay } = rates;
        let step = LionStep {
            lr,
            beta_1,
            beta_2,
            weight_decay,
            grad_factor,
        };
        let exp_avg = old.take(Moment::ExpAvg);
        let old = LionState {
            param: old.param,
            exp_avg,
            rounded: old.rounded,
        };
        let LionState {
            param,
            exp_avg,
            rounded,
        } = match factor_on_gpu {
            Some(factor) => lion_scaled(old, grad, factor, &step),
            None => lion(old, grad, &step),
        };
        ParamState {
            param,
            rounded,
            moments: [(Moment::ExpAvg, exp_avg)].into(),
            amax: None,
        }
    }
}

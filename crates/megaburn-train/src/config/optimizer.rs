use megaburn_optim::AdamWConfig;
use serde::{Deserialize, Serialize};

use super::{
    Dtype,
    check::{not_negative, positive, require},
};
use crate::{TrainError, schedule::LrSchedule};

/// `[optimizer]`: AdamW, its learning-rate schedule, clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Learning rate at the end of the warm-up.
    pub lr: f64,
    /// Learning rate at the end of the decay.
    pub min_lr: f64,
    /// Learning rate from which the warm-up climbs: update n of w warm-up updates uses
    /// `init_lr + (lr - init_lr) * n / w`.
    pub init_lr: f64,
    /// Updates of the linear warm-up.
    pub warmup_steps: u64,
    /// Updates, the warm-up's included, at which the cosine reaches `min_lr`. Default:
    /// train.steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// What is added to the root of the mean of squares.
    pub eps: f64,
    /// Decoupled weight decay, of parameters with two dimensions or more.
    pub weight_decay: f64,
    /// Largest norm of the gradient of all parameters; 0 does not clip.
    pub clip_grad: f64,
    /// What is updated: "f32", masters of which bf16 parameters are roundings, or "bf16", those
    /// parameters themselves, where small updates are lost.
    pub main_params_dtype: Dtype,
    /// In what gradients are summed over micro-batches and ranks; "bf16" only where train.dtype is.
    pub main_grads_dtype: Dtype,
    /// In what the mean of gradients is kept. "bf16" wants a beta1 of 0.996 or less, to decay.
    pub exp_avg_dtype: Dtype,
    /// In what the mean of squared gradients is kept. "bf16" wants a beta2 of 0.996 or less, to decay.
    pub exp_avg_sq_dtype: Dtype,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            lr: 3e-3,
            min_lr: 3e-4,
            init_lr: 0.0,
            warmup_steps: 20,
            decay_steps: None,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip_grad: 1.0,
            main_params_dtype: Dtype::F32,
            main_grads_dtype: Dtype::F32,
            exp_avg_dtype: Dtype::F32,
            exp_avg_sq_dtype: Dtype::F32,
        }
    }
}

impl OptimizerConfig {
    /// The learning rate of a run of `steps` updates. A run shorter than the warm-up is all
    /// warm-up.
    pub fn schedule(&self, steps: u64) -> LrSchedule {
        LrSchedule {
            init: self.init_lr,
            max: self.lr,
            min: self.min_lr,
            warmup_steps: self.warmup_steps,
            decay_steps: self.decay_steps.unwrap_or(steps.max(self.warmup_steps + 1)),
        }
    }

    /// The optimizer.
    pub(crate) fn adamw(&self) -> AdamWConfig {
        AdamWConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.eps)
            .with_weight_decay(self.weight_decay)
            .with_main_params(self.main_params_dtype.into())
            .with_exp_avg(self.exp_avg_dtype.into())
            .with_exp_avg_sq(self.exp_avg_sq_dtype.into())
    }

    pub(super) fn validate(&self, of_params: Dtype) -> Result<(), TrainError> {
        let Self { lr, min_lr, init_lr, warmup_steps, .. } = *self;
        positive("optimizer.lr", lr)?;
        let rule = format!("from 0 to optimizer.lr {lr}");
        require((0.0..=lr).contains(&min_lr), "optimizer.min_lr", min_lr, rule.clone())?;
        require((0.0..=lr).contains(&init_lr), "optimizer.init_lr", init_lr, rule)?;
        if let Some(decay_steps) = self.decay_steps {
            let rule = format!("more than optimizer.warmup_steps {warmup_steps}");
            require(decay_steps > warmup_steps, "optimizer.decay_steps", decay_steps, rule)?;
        }
        for (key, beta) in [("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2)] {
            require((0.0..1.0).contains(&beta), key, beta, "at least 0 and less than 1")?;
        }
        positive("optimizer.eps", self.eps)?;
        not_negative("optimizer.weight_decay", self.weight_decay)?;
        not_negative("optimizer.clip_grad", self.clip_grad)?;
        for (key, dtype) in [
            ("optimizer.main_params_dtype", self.main_params_dtype),
            ("optimizer.main_grads_dtype", self.main_grads_dtype),
        ] {
            let rule = format!("f32 where train.dtype is {of_params}");
            require(dtype == Dtype::F32 || dtype == of_params, key, dtype, rule)?;
        }
        // Rounded to 8 bits, a mean that a step takes less than 1/256 off stays what it is.
        for (key, beta, dtype) in [
            ("optimizer.beta1", self.beta1, self.exp_avg_dtype),
            ("optimizer.beta2", self.beta2, self.exp_avg_sq_dtype),
        ] {
            let rule = "at most 0.996 where its mean is kept in bf16, or the mean would never fall";
            require(dtype == Dtype::F32 || beta <= 0.996, key, beta, rule)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{ConfigLayers, Exit};

    #[rstest]
    #[case("lr = 0", "`optimizer.lr` is 0: it must be more than 0 and finite")]
    #[case("lr = inf", "`optimizer.lr` is inf: it must be more than 0 and finite")]
    #[case("min_lr = 1", "`optimizer.min_lr` is 1: it must be from 0 to optimizer.lr 0.003")]
    #[case("init_lr = -0.1", "`optimizer.init_lr` is -0.1: it must be from 0 to optimizer.lr")]
    #[case(
        "decay_steps = 20",
        "`optimizer.decay_steps` is 20: it must be more than optimizer.warmup_steps 20"
    )]
    #[case("beta1 = 1", "`optimizer.beta1` is 1: it must be at least 0 and less than 1")]
    #[case("beta2 = nan", "`optimizer.beta2` is NaN: it must be at least 0 and less than 1")]
    #[case("eps = 0", "`optimizer.eps` is 0: it must be more than 0 and finite")]
    #[case("weight_decay = -1", "`optimizer.weight_decay` is -1: it must be 0 or more and finite")]
    #[case("clip_grad = -1", "`optimizer.clip_grad` is -1: it must be 0 or more and finite")]
    #[case(
        "main_params_dtype = 'bf16'",
        "`optimizer.main_params_dtype` is bf16: it must be f32 where train.dtype is f32"
    )]
    #[case(
        "main_grads_dtype = 'bf16'",
        "`optimizer.main_grads_dtype` is bf16: it must be f32 where train.dtype is f32"
    )]
    #[case("exp_avg_dtype = 'f16'", "unknown variant `f16`")]
    #[case(
        "beta2 = 0.999\nexp_avg_sq_dtype = 'bf16'",
        "`optimizer.beta2` is 0.999: it must be at most 0.996 where its mean is kept in bf16"
    )]
    fn an_optimizer_that_cannot_be_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("o.toml", &format!("[optimizer]\n{line}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn the_decay_ends_with_the_run_unless_told_otherwise() {
        let config = OptimizerConfig::default();
        assert_eq!(config.schedule(300).lr(300), config.min_lr);
        let longer = OptimizerConfig { decay_steps: Some(600), ..config };
        assert!(longer.schedule(300).lr(300) > longer.min_lr);
        assert_eq!(longer.schedule(300).lr(600), longer.min_lr);
    }

    #[test]
    fn a_run_shorter_than_the_warm_up_only_warms_up() {
        let schedule = OptimizerConfig::default().schedule(5);
        assert!((schedule.lr(5) - 3e-3 * 5.0 / 20.0).abs() < 1e-18);
        assert_eq!(schedule.lr(20), 3e-3);
    }
}

use burn::{config::Config, tensor::FloatDType};

use crate::{AdamW, OptimError, Sharding};

/// [`AdamW`] configuration; the defaults are those of large language models. The learning rate is
/// given to each step.
#[derive(Config, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients.
    #[config(default = 0.9)]
    pub beta_1: f64,
    /// Decay of the mean of squared gradients.
    #[config(default = 0.95)]
    pub beta_2: f64,
    /// Added to the root of the second moment.
    #[config(default = 1e-8)]
    pub epsilon: f64,
    /// Decoupled weight decay, of parameters of two dimensions or more.
    #[config(default = 0.1)]
    pub weight_decay: f64,
    /// What is updated: the f32 masters of narrower parameters, or, as PyTorch's AdamW does, parameters
    /// of this type themselves, where an update that is smaller than half of the distance to the next
    /// number is lost (Megatron's `--main-params-dtype`).
    #[config(default = "FloatDType::F32")]
    pub main_params: FloatDType,
    /// In what the mean of gradients is kept (`--exp-avg-dtype`). In bf16 a step changes it only by more
    /// than 1/512 of itself: with a `beta_1` above 0.998 it would not decay.
    #[config(default = "FloatDType::F32")]
    pub exp_avg: FloatDType,
    /// In what the mean of squared gradients is kept (`--exp-avg-sq-dtype`). Likewise: with a `beta_2` of
    /// 0.999 a bf16 mean grows with large gradients and never falls again.
    #[config(default = "FloatDType::F32")]
    pub exp_avg_sq: FloatDType,
}

impl AdamWConfig {
    /// The optimizer, before its first step; of its state a rank keeps what `sharding` says.
    ///
    /// # Errors
    /// A beta outside `[0, 1)`, an epsilon that is not positive, a negative weight decay, state in f16
    /// (whose smallest numbers a squared gradient easily falls below) or f64.
    pub fn init(&self, sharding: &Sharding) -> Result<AdamW, OptimError> {
        let check = |name, value: f64, ok: bool, must_be| {
            if ok { Ok(()) } else { Err(OptimError::BadConfig { name, value, must_be }) }
        };
        let unit = |beta: f64| (0.0..1.0).contains(&beta);
        check("beta_1", self.beta_1, unit(self.beta_1), "at least 0 and below 1")?;
        check("beta_2", self.beta_2, unit(self.beta_2), "at least 0 and below 1")?;
        check("epsilon", self.epsilon, self.epsilon > 0.0, "positive")?;
        check("weight_decay", self.weight_decay, self.weight_decay >= 0.0, "at least 0")?;
        check_dtype("main_params", self.main_params)?;
        check_dtype("exp_avg", self.exp_avg)?;
        check_dtype("exp_avg_sq", self.exp_avg_sq)?;
        Ok(AdamW::new(self.clone(), sharding.clone()))
    }
}

/// Refuses types that gradients and optimizer state are not kept in.
pub(crate) fn check_dtype(name: &'static str, dtype: FloatDType) -> Result<(), OptimError> {
    match dtype {
        FloatDType::F32 | FloatDType::BF16 => Ok(()),
        dtype => Err(OptimError::BadStateDtype { name, dtype }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_configs_are_refused() {
        for (config, message) in [
            (AdamWConfig::new().with_beta_2(1.0), "beta_2 is 1; it must be at least 0 and below 1"),
            (AdamWConfig::new().with_beta_1(f64::NAN), "beta_1 is NaN"),
            (AdamWConfig::new().with_epsilon(0.0), "epsilon is 0; it must be positive"),
            (AdamWConfig::new().with_weight_decay(-0.1), "weight_decay is -0.1"),
        ] {
            let error = config.init(&Sharding::none()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        for (config, message) in [
            (
                AdamWConfig::new().with_main_params(FloatDType::F16),
                "main_params cannot be kept in F16",
            ),
            (AdamWConfig::new().with_exp_avg(FloatDType::F64), "exp_avg cannot be kept in F64"),
            (
                AdamWConfig::new().with_exp_avg_sq(FloatDType::F16),
                "exp_avg_sq cannot be kept in F16",
            ),
        ] {
            let error = config.init(&Sharding::none()).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains("F32 or BF16"), "{error}");
        }
    }
}

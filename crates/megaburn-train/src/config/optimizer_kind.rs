//! The optimizer that `[optimizer]` describes.

use megaburn_collective::ProcessGroups;
use megaburn_optim::{
    AdamWConfig, Dtype, LionConfig, MuonConfig, OptimError, Optimizer, SgdConfig, Sharding,
    StateDtype,
};

use super::{optimizer::OptimizerConfig, optimizer_name::OptimizerName, require::require};
use crate::error::TrainError;

impl OptimizerConfig {
    /// Builds the optimizer for parameters of type `dtype`. `sharding` determines what a rank
    /// keeps; Muon uses the process groups whose ranks split a matrix.
    pub(crate) fn init(
        &self,
        dtype: Dtype,
        sharding: &Sharding,
        groups: &ProcessGroups,
    ) -> Result<Optimizer, OptimError> {
        let optimizer = match self.name {
            OptimizerName::AdamW => self.adamw().init(sharding),
            OptimizerName::Sgd => SgdConfig {
                weight_decay: self.weight_decay,
                main_params: self.main_params_dtype.into(),
                momentum_buffer: self.momentum_dtype,
                ..self.sgd
            }
            .init(sharding),
            OptimizerName::Lion => LionConfig {
                weight_decay: self.weight_decay,
                main_params: self.main_params_dtype.into(),
                exp_avg: self.exp_avg_dtype,
                ..self.lion
            }
            .init(sharding),
            OptimizerName::Muon => self.muon(dtype).init(sharding, groups),
        };
        let optimizer = optimizer?.with_param_remainders(self.has_remainders(dtype));
        optimizer.with_cpu_offload(self.cpu_offload_fraction)
    }

    /// The AdamW that the section describes.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.eps)
            .with_weight_decay(self.weight_decay)
            .with_main_params(self.main_params_dtype.into())
            .with_exp_avg(self.exp_avg_dtype)
            .with_exp_avg_sq(self.exp_avg_sq_dtype)
    }

    fn muon(&self, dtype: Dtype) -> MuonConfig {
        let computed = match dtype {
            Dtype::Bf16 => Dtype::Bf16,
            Dtype::F32 | Dtype::F16 => Dtype::F32,
        };
        MuonConfig {
            dtype: self.muon.dtype.or(Some(computed)),
            momentum_buffer: self.momentum_dtype,
            adamw: self.adamw(),
            ..self.muon.clone()
        }
    }

    /// Refuses values that the optimizer cannot work with; the error names the key.
    pub(super) fn validate_rule(&self) -> Result<(), TrainError> {
        let sgd = &self.sgd;
        let muon = &self.muon;
        let rule = "more than 0 if optimizer.sgd.nesterov is true";
        require(
            !sgd.nesterov || sgd.momentum > 0.0,
            "optimizer.sgd.momentum",
            sgd.momentum,
            rule,
        )?;
        let (rule, ok) = muon.coefficients.check_steps(muon.num_ns_steps);
        require(ok, "optimizer.muon.num_ns_steps", muon.num_ns_steps, rule)?;
        // bf16 has 8 bits of mantissa: a step that reduces a mean by less than 1/256 rounds to no
        // change.
        let rule = "at most 0.996 if its moving average is stored in bf16, or the average would \
                   never fall";
        let name = self.name;
        let of = |is_used: bool, beta| if is_used { beta } else { 0.0 };
        for (key, beta, dtype) in [
            (
                "optimizer.beta1",
                of(name.has_adamw(), self.beta1),
                self.exp_avg_dtype,
            ),
            (
                "optimizer.beta2",
                of(name.has_adamw(), self.beta2),
                self.exp_avg_sq_dtype,
            ),
            (
                "optimizer.lion.beta2",
                of(name == OptimizerName::Lion, self.lion.beta_2),
                self.exp_avg_dtype,
            ),
            (
                "optimizer.sgd.momentum",
                of(name == OptimizerName::Sgd, sgd.momentum),
                self.momentum_dtype,
            ),
            (
                "optimizer.muon.momentum",
                of(name == OptimizerName::Muon, muon.momentum),
                self.momentum_dtype,
            ),
        ] {
            require(dtype != StateDtype::Bf16 || beta <= 0.996, key, beta, rule)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case(
        "name = 'adagrad'",
        "unknown variant `adagrad`, expected one of `adamw`"
    )]
    #[case(
        "[optimizer.sgd]\nmomentum = 1",
        "`optimizer.sgd.momentum` is 1: it must be at least 0"
    )]
    #[case(
        "[optimizer.sgd]\nmomentum = 0.0\nnesterov = true",
        "`optimizer.sgd.momentum` is 0: it must be more than 0 if optimizer.sgd.nesterov is true"
    )]
    #[case(
        "[optimizer.lion]\nbeta2 = -0.5",
        "`optimizer.lion.beta2` is -0.5: it must be at least 0"
    )]
    #[case("[optimizer.lion]\nbeta3 = 0.5", "beta3")]
    #[case(
        "[optimizer.muon]\nmomentum = nan",
        "`optimizer.muon.momentum` is NaN: it must be"
    )]
    #[case(
        "[optimizer.muon]\nnum_ns_steps = 6",
        "`optimizer.muon.num_ns_steps` is 6: it must be a multiple of 5 with quintic coefficients"
    )]
    #[case(
        "[optimizer.muon]\ncoefficients = 'polar_express'",
        "`optimizer.muon.num_ns_steps` is 5: it must be at least 8 with polar_express coefficients"
    )]
    #[case(
        "[optimizer.muon]\ndtype = 'f16'",
        "`optimizer.muon.dtype` is f16: it must be f32 or"
    )]
    #[case(
        "[optimizer.muon]\nextra_scale_factor = 0",
        "`optimizer.muon.extra_scale_factor` is 0"
    )]
    #[case("[optimizer.muon]\ntp_mode = 'none'", "unknown variant `none`")]
    #[case(
        "name = 'sgd'\nmomentum_dtype = 'bf16'\n[optimizer.sgd]\nmomentum = 0.999",
        "`optimizer.sgd.momentum` is 0.999: it must be at most 0.996"
    )]
    fn an_optimizer_that_cannot_be_is_refused(#[case] lines: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("o.toml", &format!("[optimizer]\n{lines}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn what_another_optimizer_would_refuse_is_no_matter() {
        let lines = "name = 'lion'\nbeta2 = 0.999\nexp_avg_sq_dtype = 'bf16'";
        let layers = ConfigLayers::new().with_text("o.toml", &format!("[optimizer]\n{lines}"));
        layers.and_then(ConfigLayers::load).unwrap();
    }
}

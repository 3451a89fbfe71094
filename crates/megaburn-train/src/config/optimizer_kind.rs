use std::fmt;

use megaburn_collective::ProcessGroups;
use megaburn_optim::{
    AdamWConfig, LionConfig, MuonConfig, MuonScale, MuonTpMode, NewtonSchulz, OptimError,
    Optimizer, SgdConfig, Sharding,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Dtype, OptimizerConfig,
    json_schema::Names,
    rules::{positive, require},
};
use crate::TrainError;

/// The optimizer that updates parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum OptimizerName {
    /// AdamW.
    #[default]
    AdamW,
    /// Gradient descent with momentum. Its weight decay is added to the gradient.
    Sgd,
    /// Lion.
    Lion,
    /// Muon for matrices; AdamW for the embedding, the output matrix and everything else.
    Muon,
}

impl OptimizerName {
    /// Whether the optimizer keeps AdamW's moments, at least for some parameters.
    pub(super) fn has_adamw(self) -> bool {
        matches!(self, Self::AdamW | Self::Muon)
    }
}

impl fmt::Display for OptimizerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AdamW => "adamw",
            Self::Sgd => "sgd",
            Self::Lion => "lion",
            Self::Muon => "muon",
        })
    }
}

/// `[optimizer.sgd]`: options of `optimizer.name = "sgd"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct SgdSection {
    /// Decay of the momentum, from 0 to below 1; 0 keeps no momentum.
    pub momentum: f64,
    /// Whether to use Nesterov momentum; it needs `momentum` above 0.
    pub nesterov: bool,
}

impl Default for SgdSection {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            nesterov: false,
        }
    }
}

/// `[optimizer.lion]`: options of `optimizer.name = "lion"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct LionSection {
    /// Weight of the mean of gradients in the direction whose sign is taken, from 0 to below 1.
    pub beta1: f64,
    /// Decay of the mean of gradients, from 0 to below 1.
    pub beta2: f64,
}

impl Default for LionSection {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.99,
        }
    }
}

/// `[optimizer.muon]`: options of `optimizer.name = "muon"`, for matrices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct MuonSection {
    /// Decay of the momentum, from 0 to below 1.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Number of Newton-Schulz steps that orthogonalize a matrix.
    pub num_ns_steps: usize,
    /// Coefficients of the Newton-Schulz polynomials: `simple`, `quintic` (made for five steps) or
    /// `polar_express` (made for eight).
    #[schemars(with = "Names<NewtonSchulz>")]
    pub coefficients: NewtonSchulz,
    /// Element type of the Newton-Schulz iteration: `f32` or `bf16`. Default: `bf16` if
    /// `train.dtype` is `bf16`, else `f32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Factor on the update of an `[in, out]` matrix: the square root of its larger size
    /// (`spectral`), of `out / in` (`unit_rms_norm`) or of `max(1, out / in)` (`shape_scaling`).
    #[schemars(with = "Names<MuonScale>")]
    pub scale_mode: MuonScale,
    /// Further factor on the update. 0.2 with `spectral` moves elements about as far as AdamW does.
    pub extra_scale_factor: f64,
    /// How tensor-parallel ranks orthogonalize a matrix: `duplicated`, every rank all of it;
    /// `distributed`, together; `blockwise`, each rank its own shard, which makes the optimizer
    /// depend on `parallel.tp`.
    #[schemars(with = "Names<MuonTpMode>")]
    pub tp_mode: MuonTpMode,
}

impl Default for MuonSection {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            num_ns_steps: 5,
            coefficients: NewtonSchulz::default(),
            dtype: None,
            scale_mode: MuonScale::default(),
            extra_scale_factor: 0.2,
            tp_mode: MuonTpMode::default(),
        }
    }
}

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
            OptimizerName::Sgd => SgdConfig::new()
                .with_momentum(self.sgd.momentum)
                .with_nesterov(self.sgd.nesterov)
                .with_weight_decay(self.weight_decay)
                .with_main_params(self.main_params_dtype.into())
                .with_momentum_buffer(self.momentum_dtype.into())
                .init(sharding),
            OptimizerName::Lion => LionConfig::new()
                .with_beta_1(self.lion.beta1)
                .with_beta_2(self.lion.beta2)
                .with_weight_decay(self.weight_decay)
                .with_main_params(self.main_params_dtype.into())
                .with_exp_avg(self.exp_avg_dtype.into())
                .init(sharding),
            OptimizerName::Muon => self.muon(dtype).init(sharding, groups),
        };
        optimizer?.with_cpu_offload(self.cpu_offload_fraction)
    }

    /// The AdamW that the section describes.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.eps)
            .with_weight_decay(self.weight_decay)
            .with_main_params(self.main_params_dtype.into())
            .with_exp_avg(self.exp_avg_dtype.into())
            .with_exp_avg_sq(self.exp_avg_sq_dtype.into())
    }

    fn muon(&self, dtype: Dtype) -> MuonConfig {
        let muon = &self.muon;
        let computed = muon.dtype.unwrap_or(match dtype {
            Dtype::Bf16 => Dtype::Bf16,
            Dtype::F32 | Dtype::F16 => Dtype::F32,
        });
        MuonConfig::new()
            .with_momentum(muon.momentum)
            .with_nesterov(muon.nesterov)
            .with_num_ns_steps(muon.num_ns_steps)
            .with_coefficients(muon.coefficients)
            .with_dtype(computed.into())
            .with_scale(muon.scale_mode)
            .with_extra_scale(muon.extra_scale_factor)
            .with_tp_mode(muon.tp_mode)
            .with_momentum_buffer(self.momentum_dtype.into())
            .with_adamw(self.adamw())
    }

    /// Refuses values that the optimizer cannot work with; the error names the key.
    pub(super) fn validate_rule(&self) -> Result<(), TrainError> {
        let decays = [
            ("optimizer.beta1", self.beta1),
            ("optimizer.beta2", self.beta2),
            ("optimizer.sgd.momentum", self.sgd.momentum),
            ("optimizer.lion.beta1", self.lion.beta1),
            ("optimizer.lion.beta2", self.lion.beta2),
            ("optimizer.muon.momentum", self.muon.momentum),
        ];
        for (key, decay) in decays {
            require(
                (0.0..1.0).contains(&decay),
                key,
                decay,
                "at least 0 and less than 1",
            )?;
        }
        positive("optimizer.eps", self.eps)?;
        let sgd = &self.sgd;
        let muon = &self.muon;
        let rule = "more than 0 if optimizer.sgd.nesterov is true";
        require(
            !sgd.nesterov || sgd.momentum > 0.0,
            "optimizer.sgd.momentum",
            sgd.momentum,
            rule,
        )?;
        positive("optimizer.muon.extra_scale_factor", muon.extra_scale_factor)?;
        let (rule, ok) = muon.coefficients.check_steps(muon.num_ns_steps);
        require(ok, "optimizer.muon.num_ns_steps", muon.num_ns_steps, rule)?;
        let rule = "f32 or bf16";
        let dtype = muon.dtype.unwrap_or_default();
        require(dtype != Dtype::F16, "optimizer.muon.dtype", dtype, rule)?;
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
                of(name == OptimizerName::Lion, self.lion.beta2),
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
            require(dtype == Dtype::F32 || beta <= 0.996, key, beta, rule)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{ConfigLayers, Exit};

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

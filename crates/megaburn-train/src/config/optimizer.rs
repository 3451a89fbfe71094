use megaburn_optim::{LossScaleConfig, WeightDecayStyle, WsdStyle};
use serde::{Deserialize, Serialize};

use super::{
    Dtype, TrainingConfig,
    optimizer_kind::{LionSection, MuonSection, OptimizerName, SgdSection},
    rules::{not_negative, positive, require},
    schedule::LrDecayStyle,
};
use crate::TrainError;

/// `[optimizer]`: which one, its schedules, clipping, loss scaling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Which one.
    pub name: OptimizerName,
    /// Learning rate at the end of the warm-up.
    pub lr: f64,
    /// Learning rate at the end of the decay.
    pub min_lr: f64,
    /// Learning rate from which the warm-up climbs: an update with which n of w warm-up samples are
    /// trained on uses `init_lr + (lr - init_lr) * n / w`.
    pub init_lr: f64,
    /// How the learning rate falls behind the warm-up.
    pub lr_decay_style: LrDecayStyle,
    /// Updates of the linear warm-up.
    pub warmup_steps: u64,
    /// Its samples, in place of `warmup_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_samples: Option<u64>,
    /// The warm-up as a part of the decay, in place of `warmup_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_fraction: Option<f64>,
    /// Updates, the warm-up's included, at which the learning rate reaches `min_lr`. Default:
    /// train.steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// The same in samples, in place of `decay_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_samples: Option<u64>,
    /// The shape of the fall that ends a `wsd` decay.
    pub wsd_decay_style: WsdStyle,
    /// Updates of that fall, of `train.global_batch` samples each. Default: a tenth of the decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wsd_decay_steps: Option<u64>,
    /// Its samples, in place of `wsd_decay_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wsd_decay_samples: Option<u64>,
    /// Learning rate of the token embedding and of the output matrix at the end of the warm-up, which
    /// climbs to it from `init_lr` where that is lower. Default: `lr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoupled_lr: Option<f64>,
    /// Theirs at the end of the decay. Default: `min_lr`, or their own where that is lower.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoupled_min_lr: Option<f64>,
    /// AdamW's decay of the mean of gradients.
    pub beta1: f64,
    /// Its decay of the mean of squared gradients.
    pub beta2: f64,
    /// What it adds to the root of the mean of squares.
    pub eps: f64,
    /// Weight decay, of parameters with two dimensions or more; decoupled but for "sgd".
    pub weight_decay: f64,
    /// What it has become after `weight_decay_steps`. Default: the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_weight_decay: Option<f64>,
    /// Updates at which weight decay has become `end_weight_decay`. Default: train.steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay_steps: Option<u64>,
    /// How it gets there.
    pub weight_decay_style: WeightDecayStyle,
    /// Largest norm of the gradient of all parameters; 0 does not clip.
    pub clip_grad: f64,
    /// A step whose gradient has a larger norm changes nothing; 0 skips none.
    pub grad_norm_skip_threshold: f64,
    /// What the loss of an f16 run is multiplied with, so that small gradients do not vanish. Default:
    /// what the next four keys say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Where that starts.
    pub initial_loss_scale: f64,
    /// It falls no lower.
    pub min_loss_scale: f64,
    /// Steps without an overflow after which it is doubled.
    pub loss_scale_window: u64,
    /// Overflows after which it is halved; counted anew when it is doubled.
    pub hysteresis: u64,
    /// What is updated: "f32", masters of which bf16 parameters are roundings, or "bf16", those
    /// parameters themselves, where small updates are lost.
    pub main_params_dtype: Dtype,
    /// In what gradients are summed over micro-batches and ranks; "bf16" only where train.dtype is.
    pub main_grads_dtype: Dtype,
    /// In what the mean of gradients is kept. "bf16" wants a beta1 of 0.996 or less, to decay.
    pub exp_avg_dtype: Dtype,
    /// In what the mean of squared gradients is kept. "bf16" wants a beta2 of 0.996 or less, to decay.
    pub exp_avg_sq_dtype: Dtype,
    /// In what "sgd" and "muon" keep their momentum. "bf16" wants one of 0.996 or less.
    pub momentum_dtype: Dtype,
    /// How much of the optimizer's state, masters included, is in host memory and comes to the GPU for
    /// an update, from 0, none, to 1, all; no number changes.
    pub cpu_offload_fraction: f64,
    /// `[optimizer.sgd]`: what only "sgd" reads.
    pub sgd: SgdSection,
    /// `[optimizer.lion]`: what only "lion" reads.
    pub lion: LionSection,
    /// `[optimizer.muon]`: what only "muon" reads.
    pub muon: MuonSection,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: OptimizerName::AdamW,
            lr: 3e-3,
            min_lr: 3e-4,
            init_lr: 0.0,
            lr_decay_style: LrDecayStyle::Cosine,
            warmup_steps: 20,
            warmup_samples: None,
            warmup_fraction: None,
            decay_steps: None,
            decay_samples: None,
            wsd_decay_style: WsdStyle::Exponential,
            wsd_decay_steps: None,
            wsd_decay_samples: None,
            decoupled_lr: None,
            decoupled_min_lr: None,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            end_weight_decay: None,
            weight_decay_steps: None,
            weight_decay_style: WeightDecayStyle::Linear,
            clip_grad: 1.0,
            grad_norm_skip_threshold: 0.0,
            loss_scale: None,
            initial_loss_scale: LossScaleConfig::default().initial,
            min_loss_scale: LossScaleConfig::default().min,
            loss_scale_window: 1000,
            hysteresis: LossScaleConfig::default().hysteresis,
            main_params_dtype: Dtype::F32,
            main_grads_dtype: Dtype::F32,
            exp_avg_dtype: Dtype::F32,
            exp_avg_sq_dtype: Dtype::F32,
            momentum_dtype: Dtype::F32,
            cpu_offload_fraction: 0.0,
            sgd: SgdSection::default(),
            lion: LionSection::default(),
            muon: MuonSection::default(),
        }
    }
}

impl OptimizerConfig {
    /// How the loss of an f16 run is scaled.
    pub(crate) fn scaling(&self) -> LossScaleConfig {
        let Self {
            min_loss_scale: min,
            hysteresis,
            ..
        } = *self;
        match self.loss_scale {
            Some(scale) => LossScaleConfig {
                initial: scale,
                min: scale,
                window: None,
                hysteresis,
            },
            None => LossScaleConfig {
                initial: self.initial_loss_scale,
                min,
                window: Some(self.loss_scale_window),
                hysteresis,
            },
        }
    }

    pub(super) fn validate(&self, train: &TrainingConfig) -> Result<(), TrainError> {
        self.validate_schedules(train)?;
        let of_params = train.dtype;
        self.validate_rule()?;
        not_negative("optimizer.clip_grad", self.clip_grad)?;
        not_negative(
            "optimizer.grad_norm_skip_threshold",
            self.grad_norm_skip_threshold,
        )?;
        self.validate_loss_scale()?;
        let fraction = self.cpu_offload_fraction;
        let key = "optimizer.cpu_offload_fraction";
        let ok = (0.0..=1.0).contains(&fraction);
        require(ok, key, fraction, "at least 0 and at most 1")?;
        for (key, dtype) in [
            ("optimizer.main_params_dtype", self.main_params_dtype),
            ("optimizer.main_grads_dtype", self.main_grads_dtype),
            ("optimizer.exp_avg_dtype", self.exp_avg_dtype),
            ("optimizer.exp_avg_sq_dtype", self.exp_avg_sq_dtype),
            ("optimizer.momentum_dtype", self.momentum_dtype),
        ] {
            let rule = "f32 or bf16: sums and small updates leave the range of f16";
            require(dtype != Dtype::F16, key, dtype, rule)?;
        }
        for (key, dtype) in [
            ("optimizer.main_params_dtype", self.main_params_dtype),
            ("optimizer.main_grads_dtype", self.main_grads_dtype),
        ] {
            let rule = format!("f32 where train.dtype is {of_params}");
            require(dtype == Dtype::F32 || dtype == of_params, key, dtype, rule)?;
        }
        Ok(())
    }

    fn validate_loss_scale(&self) -> Result<(), TrainError> {
        let Self {
            initial_loss_scale: initial,
            min_loss_scale: min,
            ..
        } = *self;
        if let Some(scale) = self.loss_scale {
            let ok = scale > 0.0 && scale <= 2f64.powi(126);
            require(
                ok,
                "optimizer.loss_scale",
                scale,
                "more than 0 and at most 2^126",
            )?;
        }
        positive("optimizer.min_loss_scale", min)?;
        let rule = format!("at least optimizer.min_loss_scale {min} and at most 2^126");
        let ok = (min..=2f64.powi(126)).contains(&initial);
        require(ok, "optimizer.initial_loss_scale", initial, rule)?;
        for (key, steps) in [
            ("optimizer.loss_scale_window", self.loss_scale_window),
            ("optimizer.hysteresis", self.hysteresis),
        ] {
            require(steps >= 1, key, steps, "at least 1")?;
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
        "beta1 = 1",
        "`optimizer.beta1` is 1: it must be at least 0 and less than 1"
    )]
    #[case(
        "beta2 = nan",
        "`optimizer.beta2` is NaN: it must be at least 0 and less than 1"
    )]
    #[case("eps = 0", "`optimizer.eps` is 0: it must be more than 0 and finite")]
    #[case(
        "clip_grad = -1",
        "`optimizer.clip_grad` is -1: it must be 0 or more and finite"
    )]
    #[case(
        "main_params_dtype = 'bf16'",
        "`optimizer.main_params_dtype` is bf16: it must be f32 where train.dtype is f32"
    )]
    #[case(
        "main_grads_dtype = 'bf16'",
        "`optimizer.main_grads_dtype` is bf16: it must be f32 where train.dtype is f32"
    )]
    #[case(
        "exp_avg_dtype = 'f16'",
        "`optimizer.exp_avg_dtype` is f16: it must be f32 or bf16"
    )]
    #[case(
        "main_grads_dtype = 'f16'",
        "`optimizer.main_grads_dtype` is f16: it must be f32 or"
    )]
    #[case("exp_avg_sq_dtype = 'f8'", "unknown variant `f8`")]
    #[case(
        "grad_norm_skip_threshold = -1",
        "`optimizer.grad_norm_skip_threshold` is -1: it must be 0 or more and finite"
    )]
    #[case(
        "loss_scale = 0",
        "`optimizer.loss_scale` is 0: it must be more than 0 and at most 2^126"
    )]
    #[case("loss_scale = 1e39", "2^126")]
    #[case(
        "min_loss_scale = 0",
        "`optimizer.min_loss_scale` is 0: it must be more than 0"
    )]
    #[case(
        "initial_loss_scale = 2\nmin_loss_scale = 4",
        "`optimizer.initial_loss_scale` is 2: it must be at least optimizer.min_loss_scale 4"
    )]
    #[case(
        "initial_loss_scale = inf",
        "`optimizer.initial_loss_scale` is inf: it must be at"
    )]
    #[case(
        "loss_scale_window = 0",
        "`optimizer.loss_scale_window` is 0: it must be at least 1"
    )]
    #[case("hysteresis = 0", "`optimizer.hysteresis` is 0: it must be at least 1")]
    #[case(
        "cpu_offload_fraction = 1.5",
        "`optimizer.cpu_offload_fraction` is 1.5: it must be at least 0 and at most 1"
    )]
    #[case(
        "cpu_offload_fraction = nan",
        "`optimizer.cpu_offload_fraction` is NaN: it must be"
    )]
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
}

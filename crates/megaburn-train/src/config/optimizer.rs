//! The section `[optimizer]`.

use megaburn_optim::{
    Dtype, LionConfig, LossScaleConfig, MuonConfig, SgdConfig, StateDtype, WeightDecayStyle,
    WsdStyle,
};
use megaburn_parallel::QkClip;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ParamGroupConfig, TrainingConfig, ineffective_keys::Condition, optimizer_name::OptimizerName,
    require::require, schedule_at::ScheduleAt,
};
use crate::error::TrainError;

/// What the types of optimizer state must be.
const NOT_F16: &str = "f32 or bf16: sums and small updates exceed the range of f16";

/// `[optimizer]`: the optimizer, its schedules, clipping and loss scaling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct OptimizerConfig {
    /// The optimizer: `adamw`, `sgd`, `lion` or `muon`.
    pub name: OptimizerName,
    /// Learning rate at the end of the warm-up. Default with `model.init`: 2e-5.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lr: f64,
    /// Learning rate at the end of the decay, from 0 to `lr`. Default with `model.init`: a tenth of
    /// `lr`.
    #[schemars(extend("minimum" = 0, "x-rule" = false))]
    pub min_lr: f64,
    /// Learning rate at the start of the warm-up, from 0 to `lr`. The update that ends at warm-up
    /// sample `n` of `w` uses `init_lr + (lr - init_lr) * n / w`.
    #[schemars(extend("minimum" = 0, "x-rule" = false))]
    pub init_lr: f64,
    /// How the learning rate decays after the warm-up, as a function of the samples trained on:
    /// `constant`, `linear`, `cosine`, `inverse_square_root` or `wsd` (see `wsd_decay_style`).
    pub lr_decay_style: LrDecayStyle,
    /// Whether an update uses the learning rate and the weight decay of the samples at its `start`,
    /// as Megatron-LM does, or at its `end`.
    pub schedule_at: ScheduleAt,
    /// Length of the linear warm-up in updates.
    pub warmup_steps: u64,
    /// Length of the warm-up in samples, instead of `warmup_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_samples: Option<u64>,
    /// Length of the warm-up as a fraction of the decay, from 0 to below 1, instead of
    /// `warmup_steps`. Default with `model.init`: 0.03.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_fraction: Option<f64>,
    /// Updates, including the warm-up, after which the learning rate reaches `min_lr`. Default:
    /// `train.steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Samples, including the warm-up, after which the learning rate reaches `min_lr`, instead of
    /// `decay_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_samples: Option<u64>,
    /// Shape of the final decay with `lr_decay_style = "wsd"`: `exponential`, `linear`, `cosine` or
    /// `minus_sqrt`.
    pub wsd_decay_style: WsdStyle,
    /// Length of the final decay of `wsd` in updates of `train.global_batch` samples each. Default:
    /// a tenth of the decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wsd_decay_steps: Option<u64>,
    /// Length of the final decay of `wsd` in samples, instead of `wsd_decay_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wsd_decay_samples: Option<u64>,
    /// Learning rate of the token embedding and the output matrix at the end of the warm-up, which
    /// starts from `init_lr` or from this rate if that is lower. Default: `lr`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoupled_lr: Option<f64>,
    /// Learning rate of the token embedding and the output matrix at the end of the decay. Used
    /// with `decoupled_lr`. Default: `min_lr`, or `decoupled_lr` if that is lower.
    #[schemars(extend("minimum" = 0, "x-rule" = false))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoupled_min_lr: Option<f64>,
    /// AdamW: decay of the mean of gradients, from 0 to below 1. Used with `adamw` and `muon`.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub beta1: f64,
    /// AdamW: decay of the mean of squared gradients, from 0 to below 1. Used with `adamw` and
    /// `muon`.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub beta2: f64,
    /// AdamW: added to the square root of the mean of squared gradients. Used with `adamw` and
    /// `muon`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub eps: f64,
    /// Weight decay of parameters with two or more dimensions. It is decoupled, except that `sgd`
    /// adds it to the gradient.
    #[schemars(extend("minimum" = 0))]
    pub weight_decay: f64,
    /// Weight decay after `weight_decay_steps` updates. Default: `weight_decay`, i.e. no change.
    #[schemars(extend("minimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_weight_decay: Option<f64>,
    /// Updates after which weight decay reaches `end_weight_decay`. Default: `train.steps`.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay_steps: Option<u64>,
    /// How weight decay changes to `end_weight_decay`: `linear` or `cosine`.
    pub weight_decay_style: WeightDecayStyle,
    /// Largest global norm of the gradient of all parameters; larger gradients are scaled down. 0
    /// turns clipping off.
    #[schemars(extend("minimum" = 0))]
    pub clip_grad: f64,
    /// A step whose gradient has a larger global norm than this is skipped; 0 skips none.
    #[schemars(extend("minimum" = 0))]
    pub grad_norm_skip_threshold: f64,
    /// Whether an update is followed by a clipping of queries and keys (QK-Clip of MuonClip; Megatron-LM's
    /// `--qk-clip`): if the largest attention logit of a head in the step exceeds `qk_clip_threshold`,
    /// the weights and biases of its queries and keys are scaled so that it would have been the
    /// threshold. Training then computes the products of queries and keys a second time. Not with
    /// norms of queries or keys (`model.parts.qk_norm`), which undo the scaling.
    pub qk_clip: bool,
    /// Share of that scaling that queries take; keys take the rest. Used with `qk_clip`.
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    pub qk_clip_alpha: f64,
    /// The largest attention logit that is not clipped. Used with `qk_clip`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub qk_clip_threshold: f64,
    /// Fixed factor on the loss of an f16 run, which keeps small gradients representable. Used with
    /// `train.dtype = "f16"`. Default: a dynamic factor, controlled by the next four keys.
    #[schemars(extend("exclusiveMinimum" = 0, "x-rule" = false))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Dynamic loss scale of the first step. Used with `train.dtype = "f16"`, without `loss_scale`.
    pub initial_loss_scale: f64,
    /// The dynamic loss scale is never reduced below this.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub min_loss_scale: f64,
    /// Steps without an overflow after which the dynamic loss scale is doubled.
    #[schemars(extend("minimum" = 1))]
    pub loss_scale_window: u64,
    /// Overflows after which the dynamic loss scale is halved. The count is reset when the scale is
    /// doubled.
    #[schemars(extend("minimum" = 1))]
    pub hysteresis: u64,
    /// Element type of the parameters that the optimizer updates: `f32` keeps masters of bf16
    /// parameters; `bf16` updates the bf16 parameters themselves, and small updates are lost. Only
    /// `f32` unless `train.dtype` is `bf16`.
    #[schemars(extend("x-refused" = ["f16", "float16"], "x-rule" = NOT_F16))]
    pub main_params_dtype: Dtype,
    /// Whether the f32 masters of bf16 parameters are stored as the 16 bits that the parameters lack
    /// of them: two bytes per element instead of four, and the same numbers. Used with
    /// `train.dtype = "bf16"` and `main_params_dtype = "f32"`.
    pub store_param_remainders: bool,
    /// Element type in which gradients are accumulated over micro-batches and ranks: `f32`, or
    /// `bf16` if `train.dtype` is `bf16`.
    #[schemars(extend("x-refused" = ["f16", "float16"], "x-rule" = NOT_F16))]
    pub main_grads_dtype: Dtype,
    /// Element type of the mean of gradients: `f32`, `bf16` or `fp8`, which is e4m3 with a scale for
    /// each 128 elements and stochastic rounding. With `bf16`, `beta1` (`lion.beta2` with lion) must
    /// be at most 0.996, or the mean would never decay.
    pub exp_avg_dtype: StateDtype,
    /// Element type of AdamW's mean of squared gradients: `f32`, `bf16` or `fp8`, which stores its
    /// root. With `bf16`, `beta2` must be at most 0.996, or the mean would never decay.
    pub exp_avg_sq_dtype: StateDtype,
    /// Element type of the momentum of `sgd` and `muon`: `f32`, `bf16` or `fp8`. With `bf16`, the
    /// momentum must be at most 0.996, or it would never decay.
    pub momentum_dtype: StateDtype,
    /// Fraction of the optimizer state, including masters, that is kept in host memory and copied
    /// to the GPU for an update, from 0 (none) to 1 (all). It changes no number.
    #[schemars(extend("minimum" = 0, "maximum" = 1, "x-rule" = "at least 0 and at most 1"))]
    pub cpu_offload_fraction: f64,
    /// Parameters with a learning rate or a weight decay of their own, as `[[optimizer.groups]]`
    /// tables with `match`, `lr` and `weight_decay`. A parameter belongs to the first group that fits
    /// its path.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroupConfig>,
    /// `[optimizer.sgd]`: options of `name = "sgd"`.
    pub sgd: SgdConfig,
    /// `[optimizer.lion]`: options of `name = "lion"`.
    pub lion: LionConfig,
    /// `[optimizer.muon]`: options of `name = "muon"`.
    pub muon: MuonConfig,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: OptimizerName::AdamW,
            lr: 3e-3,
            min_lr: 3e-4,
            init_lr: 0.0,
            lr_decay_style: LrDecayStyle::Cosine,
            schedule_at: ScheduleAt::End,
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
            qk_clip: false,
            qk_clip_alpha: 0.5,
            qk_clip_threshold: 100.0,
            loss_scale: None,
            initial_loss_scale: LossScaleConfig::default().initial,
            min_loss_scale: LossScaleConfig::default().min,
            loss_scale_window: 1000,
            hysteresis: LossScaleConfig::default().hysteresis,
            main_params_dtype: Dtype::F32,
            store_param_remainders: false,
            main_grads_dtype: Dtype::F32,
            exp_avg_dtype: StateDtype::F32,
            exp_avg_sq_dtype: StateDtype::F32,
            groups: Vec::new(),
            momentum_dtype: StateDtype::F32,
            cpu_offload_fraction: 0.0,
            sgd: SgdConfig::default(),
            lion: LionConfig::default(),
            muon: MuonConfig::default(),
        }
    }
}

/// How the learning rate decays after the warm-up (Megatron-LM's `--lr-decay-style`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum LrDecayStyle {
    /// It stays constant.
    Constant,
    /// Linearly in the samples.
    Linear,
    /// Along half a period of a cosine.
    #[default]
    Cosine,
    /// Proportionally to `sqrt(warm-up samples / samples)`, but never below `min_lr`.
    InverseSquareRoot,
    /// Constant until the final decay, which has the shape `wsd_decay_style` (warm-up, stable,
    /// decay).
    Wsd,
}

impl OptimizerConfig {
    /// The loss scaling of an f16 run.
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

    /// How queries and keys are clipped after an update; `None` if they are not.
    pub(crate) fn clips_queries_and_keys(&self) -> Option<QkClip> {
        self.qk_clip.then_some(QkClip {
            threshold: self.qk_clip_threshold,
            alpha: self.qk_clip_alpha,
        })
    }

    /// Whether the parameter at `path` belongs to a group whose learning rate is 0.
    pub(crate) fn is_frozen(&self, path: &str) -> bool {
        let group = self.groups.iter().find(|group| group.matches(path));
        group.is_some_and(|group| group.lr == Some(0.0))
    }

    /// Whether masters of parameters of type `dtype` are stored as remainders.
    pub(crate) fn has_remainders(&self, dtype: Dtype) -> bool {
        let has_masters = dtype == Dtype::Bf16 && self.main_params_dtype == Dtype::F32;
        self.store_param_remainders && has_masters
    }

    /// When keys of the section have an effect, in a run with parameters of type `dtype`.
    pub(super) fn conditions(&self, dtype: Dtype) -> Vec<Condition> {
        let has_adamw = self.name.has_adamw();
        let [sgd, lion, muon] = [OptimizerName::Sgd, OptimizerName::Lion, OptimizerName::Muon]
            .map(|it| self.name == it);
        let is_f16 = dtype == Dtype::F16;
        vec![
            (
                "beta1 beta2 eps exp_avg_sq_dtype",
                has_adamw,
                "with optimizer.name = \"adamw\" or \"muon\"",
            ),
            (
                "exp_avg_dtype",
                has_adamw || lion,
                "with optimizer.name = \"adamw\", \"lion\" or \"muon\"",
            ),
            (
                "momentum_dtype",
                sgd || muon,
                "with optimizer.name = \"sgd\" or \"muon\"",
            ),
            ("sgd", sgd, "with optimizer.name = \"sgd\""),
            ("lion", lion, "with optimizer.name = \"lion\""),
            ("muon", muon, "with optimizer.name = \"muon\""),
            (
                "wsd_decay_style wsd_decay_steps wsd_decay_samples",
                self.lr_decay_style == LrDecayStyle::Wsd,
                "with optimizer.lr_decay_style = \"wsd\"",
            ),
            (
                "qk_clip_alpha qk_clip_threshold",
                self.qk_clip,
                "with optimizer.qk_clip = true",
            ),
            (
                "store_param_remainders",
                self.has_remainders(dtype),
                "with train.dtype = \"bf16\" and optimizer.main_params_dtype = \"f32\"",
            ),
            ("loss_scale", is_f16, "with train.dtype = \"f16\""),
            (
                "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
                is_f16 && self.loss_scale.is_none(),
                "with train.dtype = \"f16\" and without optimizer.loss_scale",
            ),
            (
                "decoupled_min_lr",
                self.decoupled_lr.is_some(),
                "with optimizer.decoupled_lr",
            ),
            (
                "weight_decay_style weight_decay_steps",
                self.end_weight_decay.is_some(),
                "with optimizer.end_weight_decay",
            ),
        ]
    }

    pub(super) fn validate(&self, train: &TrainingConfig) -> Result<(), TrainError> {
        self.validate_schedules(train)?;
        self.groups
            .iter()
            .try_for_each(ParamGroupConfig::validate)?;
        let of_params = train.dtype;
        self.validate_rule()?;
        self.validate_loss_scale()?;
        for (key, dtype) in [
            ("optimizer.main_params_dtype", self.main_params_dtype),
            ("optimizer.main_grads_dtype", self.main_grads_dtype),
        ] {
            let rule = format!("f32 if train.dtype is {of_params}");
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
        let rule = format!("at least optimizer.min_loss_scale {min} and at most 2^126");
        let ok = (min..=2f64.powi(126)).contains(&initial);
        require(ok, "optimizer.initial_loss_scale", initial, rule)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

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
        "`optimizer.main_params_dtype` is bf16: it must be f32 if train.dtype is f32"
    )]
    #[case(
        "main_grads_dtype = 'bf16'",
        "`optimizer.main_grads_dtype` is bf16: it must be f32 if train.dtype is f32"
    )]
    #[case(
        "exp_avg_dtype = 'f16'",
        "unknown variant `f16`, expected one of `f32`, `float32`, `bf16`, `bfloat16`, `fp8`"
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
        "`optimizer.beta2` is 0.999: it must be at most 0.996 if its moving average is stored in bf16"
    )]
    fn an_optimizer_that_cannot_be_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("o.toml", &format!("[optimizer]\n{line}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}

//! The check of a configuration, section by section. The fields carry their ranges as attributes, and
//! each section checks what its keys require of each other. `validate_against_layout.rs` checks them with
//! the layout, the model and the data.

use super::{Dtype, OptimizerName, TrainConfig, ranges, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// Refuses values that no run can use. Called by
    /// [`ConfigLayers::load`](super::ConfigLayers::load).
    ///
    /// # Errors
    /// The first such value; the error names its key.
    pub fn validate(&self) -> Result<(), TrainError> {
        self.run.validate()?;
        ranges::check("run", &self.run)?;
        ranges::check("model", &self.model)?;
        self.model.validate()?;
        ranges::check("parallel", &self.parallel)?;
        self.parallel.validate_pipeline()?;
        ranges::check("data", &self.data)?;
        self.data.validate()?;
        ranges::check("train", &self.train)?;
        self.train.validate()?;
        self.check_loss()?;
        ranges::check("optimizer", &self.optimizer)?;
        self.optimizer.validate(&self.train)?;
        let name = self.optimizer.name;
        let ok = self.model.width_multiplier() == 1.0 || name == OptimizerName::AdamW;
        let rule = "adamw, because model.parts.mup_base_hidden scales its learning rates";
        require(ok, "optimizer.name", name, rule)?;
        ranges::check("moe", &self.moe)?;
        ranges::check("recompute", &self.recompute)?;
        self.recompute.validate()?;
        ranges::check("precision", &self.precision)?;
        self.precision.validate()?;
        self.check_fp8_params()?;
        ranges::check("generate", &self.generate)?;
        self.generate.validate()?;
        self.validate_logs()
    }

    /// Refuses values of `[log]`, `[alerts]` and `[profile]` that no run can use.
    pub(super) fn validate_logs(&self) -> Result<(), TrainError> {
        ranges::check("log", &self.log)?;
        self.log.validate()?;
        ranges::check("alerts", &self.alerts)?;
        self.alerts.validate()?;
        ranges::check("profile", &self.profile)?;
        self.profile.validate()
    }

    /// Refuses to send weights in FP8 where the optimizer continues from the weights themselves.
    fn check_fp8_params(&self) -> Result<(), TrainError> {
        let is_set = self.precision.fp8_param_gather;
        let (dtype, optimizer) = (self.train.dtype, &self.optimizer);
        let main_params = optimizer.main_params_dtype;
        let why = if dtype != Dtype::Bf16 {
            format!(
                "train.dtype = {dtype}: weights are sent in FP8 in place of bf16; set train.dtype to bf16"
            )
        } else if main_params != Dtype::F32 {
            format!(
                "optimizer.main_params_dtype = {main_params}: updates would continue from rounded \
                weights; set it to f32"
            )
        } else if optimizer.store_param_remainders {
            "optimizer.store_param_remainders: a weight is the upper half of its master then, which \
            would be rounded; leave out one of the two"
                .to_string()
        } else {
            return Ok(());
        };
        let rule = format!("false with {why}");
        require(!is_set, "precision.fp8_param_gather", is_set, rule)
    }

    /// Refuses the fused loss for a model whose logits it does not compute.
    fn check_loss(&self) -> Result<(), TrainError> {
        // A model that is read from `model.init` is checked when it is there.
        let is_known = self.model.init.is_none();
        let fused = self.train.fused_linear_cross_entropy;
        let part = self.model.template().unfused_loss();
        let Some(part) = part.filter(|_| fused && is_known) else {
            return Ok(());
        };
        let rule = format!("false, because the model has {part}");
        require(false, "train.fused_linear_cross_entropy", fused, rule)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    /// Of several bad values, the one of the first section is named.
    #[rstest]
    #[case(&["model.heads=3", "generate.temperature=-1"], "model.hidden")]
    #[case(&["train.steps=0", "model.layers=0"], "model.layers")]
    #[case(&["moe.capacity_factor=-1.0", "train.micro_batch=0"], "train.micro_batch")]
    #[case(&["recompute.num_layers=0", "optimizer.lr=-1.0"], "optimizer.lr")]
    #[case(&["model.parts.mup_base_hidden=16", "optimizer.name=lion"], "optimizer.name")]
    fn sections_are_checked_in_their_order(#[case] sets: &[&str], #[case] key: &str) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let error = layers.unwrap().load().unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}`")), "{error}");
    }

    #[rstest]
    #[case(&[], "train.dtype = f32")]
    #[case(&["train.dtype=f16"], "train.dtype = f16")]
    #[case(
        &["train.dtype=bf16", "optimizer.main_params_dtype=bf16"],
        "optimizer.main_params_dtype = bf16"
    )]
    #[case(
        &["train.dtype=bf16", "optimizer.store_param_remainders=true"],
        "optimizer.store_param_remainders"
    )]
    fn weights_without_f32_masters_are_not_sent_in_fp8(#[case] sets: &[&str], #[case] why: &str) {
        let layers = ["precision.fp8_param_gather=true"]
            .iter()
            .chain(sets)
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let error = layers.unwrap().load().unwrap_err().to_string();
        let message = format!("`precision.fp8_param_gather` is true: it must be false with {why}");
        assert!(error.contains(&message), "{error}");
    }
}

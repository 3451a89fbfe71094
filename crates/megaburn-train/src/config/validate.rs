//! The check of a configuration, section by section. The fields carry their ranges as attributes, and
//! each section checks what its keys require of each other. `validate_against_layout.rs` checks them with
//! the layout, the model and the data.

use super::{OptimizerName, TrainConfig, ranges, require::require};
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
        ranges::check("generate", &self.generate)?;
        self.generate.validate()
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
}

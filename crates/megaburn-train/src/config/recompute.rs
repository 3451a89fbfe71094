use megaburn_models::decoder::Recompute;
use serde::{Deserialize, Serialize};

use super::check::require;
use crate::TrainError;

/// `[recompute]`: what backward computes once more instead of keeping it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecomputeConfig {
    /// Whose results are not kept (Megatron's `--recompute-modules`).
    pub modules: Vec<RecomputeModule>,
}

/// What can be computed once more by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeModule {
    /// The norms before attention, MLP and head.
    Norm,
    /// The activation inside the MLP.
    Activation,
}

impl RecomputeConfig {
    /// The same for a model.
    pub fn of_model(&self) -> Recompute {
        let has = |module| self.modules.contains(&module);
        Recompute { norm: has(RecomputeModule::Norm), activation: has(RecomputeModule::Activation) }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let twice = |module| self.modules.iter().filter(|&found| *found == module).count() > 1;
        for (module, name) in
            [(RecomputeModule::Norm, "norm"), (RecomputeModule::Activation, "activation")]
        {
            let value = format!("a list with \"{name}\" more than once");
            require(!twice(module), "recompute.modules", value, "a list that names each once")?;
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
    #[case("", false, false)]
    #[case("modules = []", false, false)]
    #[case("modules = [\"norm\"]", true, false)]
    #[case("modules = [\"activation\"]", false, true)]
    #[case("modules = [\"activation\", \"norm\"]", true, true)]
    fn modules_are_named(#[case] line: &str, #[case] norm: bool, #[case] activation: bool) {
        let layers = ConfigLayers::new().with_text("r.toml", &format!("[recompute]\n{line}"));
        let config = layers.unwrap().load().unwrap();
        assert_eq!(config.recompute.of_model(), Recompute { norm, activation });
    }

    #[rstest]
    #[case(
        "modules = [\"layernorm\"]",
        "unknown variant `layernorm`, expected `norm` or `activation`"
    )]
    #[case("modules = [\"core_attention\"]", "expected `norm` or `activation`")]
    #[case(
        "modules = \"norm\"",
        "`recompute.modules` in `r.toml`: expected a list in brackets, found the string"
    )]
    #[case("modules = [1]", "in `recompute.modules`")]
    #[case(
        "modules = [\"norm\", \"norm\"]",
        "`recompute.modules` is a list with \"norm\" more than once: it must be a list that names each once"
    )]
    #[case("granularity = \"full\"", "recompute.granularity")]
    fn what_cannot_be_computed_again_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("r.toml", &format!("[recompute]\n{line}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}

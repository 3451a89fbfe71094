use megaburn_models::decoder::{Recompute, RecomputeBlocks};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{ineffective_keys::Condition, require::require};
use crate::error::TrainError;

/// `[recompute]`: which activations backward recomputes instead of keeping them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct RecomputeConfig {
    /// The parts of a layer whose outputs are recomputed (Megatron-LM's `--recompute-modules`):
    /// `norm`, `activation`, `core_attention` and `mlp`. With `method = "uniform"` only `norm` has
    /// an effect.
    pub modules: Vec<RecomputeModule>,
    /// Which layers are recomputed in full, so that only the residual stream before them is kept
    /// (`--recompute-granularity full --recompute-method`): `none`, `uniform` or `block`.
    pub method: RecomputeMethod,
    /// The number of layers per group with `method = "uniform"`, or per stage with `method =
    /// "block"` (`--recompute-num-layers`).
    #[schemars(extend("minimum" = 1, "x-rule" = "1 or more (recompute.method = \"none\" recomputes no layer)"))]
    pub num_layers: usize,
    /// Whether, on GPUs, the residual streams before these layers are kept in pinned host memory
    /// until backward (`--cpu-offloading-num-layers`). Used with `method` other than `none`.
    pub offload: bool,
    /// Whether these layers keep the output of attention, so that backward does not recompute it.
    /// Used with `method` other than `none`.
    pub keep_attention: bool,
}

impl Default for RecomputeConfig {
    fn default() -> Self {
        Self {
            modules: Vec::new(),
            method: RecomputeMethod::None,
            num_layers: 1,
            offload: false,
            keep_attention: false,
        }
    }
}

/// The parts of a layer that can be recomputed separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum RecomputeModule {
    /// The outputs of the norms before attention, MLP and output matrix.
    Norm,
    /// The outputs of the activation functions inside the MLPs.
    Activation,
    /// Attention between its projections.
    CoreAttention,
    /// The entire MLP.
    Mlp,
}

/// Which layers are recomputed in full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum RecomputeMethod {
    /// No layer.
    #[default]
    None,
    /// All layers in groups of `num_layers`: the residual stream is kept before each group.
    Uniform,
    /// The first `num_layers` layers of each pipeline stage, one by one.
    Block,
}

impl RecomputeConfig {
    /// The recompute options of the model.
    pub fn of_model(&self) -> Recompute {
        let has = |module| self.modules.contains(&module) && !self.has_all_layers();
        Recompute {
            // The final norm belongs to no layer, so it is recomputed even if all layers are.
            norm: self.modules.contains(&RecomputeModule::Norm),
            activation: has(RecomputeModule::Activation),
            core_attention: has(RecomputeModule::CoreAttention),
            mlp: has(RecomputeModule::Mlp),
            blocks: match self.method {
                RecomputeMethod::None => None,
                RecomputeMethod::Uniform => Some(RecomputeBlocks::Uniform(self.num_layers)),
                RecomputeMethod::Block => Some(RecomputeBlocks::Block(self.num_layers)),
            },
            offload: self.offload,
            keep_attention: self.keep_attention,
        }
    }

    /// Whether all layers are recomputed in full, so that the modules inside them have no effect.
    pub(super) fn has_all_layers(&self) -> bool {
        self.method == RecomputeMethod::Uniform
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let has_layers = self.method != RecomputeMethod::None;
        let mut modules = self.modules.iter();
        let has_modules = !self.has_all_layers() || modules.all(|it| *it == RecomputeModule::Norm);
        vec![
            (
                "modules",
                has_modules,
                "with recompute.method = \"block\" or \"none\"",
            ),
            (
                "offload keep_attention num_layers",
                has_layers,
                "with recompute.method = \"uniform\" or \"block\"",
            ),
        ]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        use RecomputeModule::{Activation, CoreAttention, Mlp, Norm};
        for module in [Norm, Activation, CoreAttention, Mlp] {
            let num = self.modules.iter().filter(|&&it| it == module).count();
            require(
                num <= 1,
                "recompute.modules",
                format!("a list with {} more than once", json!(module)),
                "a list without repetitions",
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{config::ConfigLayers, exit::Exit};

    fn of(lines: &str) -> Recompute {
        let layers = ConfigLayers::new().with_text("r.toml", &format!("[recompute]\n{lines}"));
        layers.unwrap().load().unwrap().recompute.of_model()
    }

    #[rstest]
    #[case("", [false; 4])]
    #[case("modules = []", [false; 4])]
    #[case("modules = [\"norm\"]", [true, false, false, false])]
    #[case("modules = [\"activation\"]", [false, true, false, false])]
    #[case("modules = [\"mlp\", \"core_attention\"]", [false, false, true, true])]
    #[case("modules = [\"activation\", \"norm\"]", [true, true, false, false])]
    fn modules_are_named(#[case] line: &str, #[case] expected: [bool; 4]) {
        let [norm, activation, core_attention, mlp] = expected;
        let of_model = Recompute {
            norm,
            activation,
            core_attention,
            mlp,
            ..Recompute::default()
        };
        assert_eq!(of(line), of_model);
    }

    #[rstest]
    #[case("method = \"none\"", None)]
    #[case("num_layers = 3", None)]
    #[case("method = \"uniform\"", Some(RecomputeBlocks::Uniform(1)))]
    #[case(
        "method = \"uniform\"\nnum_layers = 3",
        Some(RecomputeBlocks::Uniform(3))
    )]
    #[case("method = \"block\"\nnum_layers = 2", Some(RecomputeBlocks::Block(2)))]
    fn layers_are_chosen(#[case] lines: &str, #[case] blocks: Option<RecomputeBlocks>) {
        assert_eq!(
            of(lines),
            Recompute {
                blocks,
                ..Recompute::default()
            }
        );
    }

    #[test]
    fn streams_are_offloaded() {
        let found = of("method = \"block\"\noffload = true");
        assert!(found.offload && found.blocks == Some(RecomputeBlocks::Block(1)));
    }

    #[test]
    fn attention_is_kept() {
        let found = of("method = \"uniform\"\nkeep_attention = true");
        assert!(found.keep_attention && found.blocks == Some(RecomputeBlocks::Uniform(1)));
    }

    #[test]
    fn modules_are_those_of_layers_that_are_left() {
        let modules = "modules = [\"norm\"]\nmethod";
        assert!(of(&format!("{modules} = \"block\"")).norm);
        let all = of("modules = [\"norm\", \"mlp\"]\nmethod = \"uniform\"");
        assert!(all.norm && !all.mlp, "the last norm is in no layer");
    }

    #[rstest]
    #[case(
        "modules = [\"layernorm\"]",
        "unknown variant `layernorm`, expected one of `norm`, `activation`, `core_attention`, `mlp`"
    )]
    #[case("modules = [\"core_attn\"]", "unknown variant `core_attn`")]
    #[case("method = \"full\"", "expected one of `none`, `uniform`, `block`")]
    #[case(
        "method = \"block\"\nnum_layers = 0",
        "`recompute.num_layers` is 0: it must be 1 or more"
    )]
    #[case(
        "modules = \"norm\"",
        "`recompute.modules` in `r.toml`: expected a list in brackets, found the string"
    )]
    #[case("modules = [1]", "`recompute.modules` in `r.toml`: ")]
    #[case(
        "modules = [\"norm\", \"norm\"]",
        "`recompute.modules` is a list with \"norm\" more than once: it must be a list without \
        repetitions"
    )]
    #[case(
        "modules = [\"mlp\", \"mlp\", \"norm\", \"norm\"]",
        "a list with \"norm\" more than once"
    )]
    #[case("granularity = \"full\"", "recompute.granularity")]
    fn what_cannot_be_computed_again_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("r.toml", &format!("[recompute]\n{line}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}

//! `[[optimizer.groups]]`: learning rates and weight decay of some parameters.

use std::collections::BTreeSet;

use megaburn_models::DecoderConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// `[[optimizer.groups]]`: parameters with a learning rate or a weight decay of their own. A parameter
/// belongs to the first group whose `match` fits its path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct ParamGroupConfig {
    /// The paths of the parameters, such as `"embedding.*"` or `"blocks.*.mlp.*"`, where `*` stands
    /// for any characters. `megaburn checkpoint ls` lists the paths of a checkpoint.
    #[serde(rename = "match")]
    pub pattern: String,
    /// The learning rate at the end of the warm-up. Warm-up and decay are those of the other
    /// parameters, in proportion: `min_lr` and `init_lr` are multiplied by this rate over `lr`. With
    /// `model.parts.mup_base_hidden` it is not divided by the width.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// The weight decay, which stays constant. Parameters of one dimension do not decay here either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

/// The key of the list, for messages.
const KEY: &str = "optimizer.groups";

impl ParamGroupConfig {
    /// Whether the parameter at `path` belongs to the group.
    pub(crate) fn matches(&self, path: &str) -> bool {
        fits(&self.pattern, path)
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let Self {
            pattern,
            lr,
            weight_decay,
        } = self;
        let rule = "a list of groups with a path in `match`, such as \"embedding.*\"";
        require(!pattern.is_empty(), KEY, "a list with an empty match", rule)?;
        let value = || format!("a list with match {pattern:?} alone");
        let sets_something = lr.is_some() || weight_decay.is_some();
        let rule = "a list of groups with lr, weight_decay or both";
        require(sets_something, KEY, value(), rule)?;
        let lr = lr.unwrap_or(1.0);
        let ok = lr.is_finite() && lr >= 0.0;
        let rule = "a list of groups with lr 0 or more and finite";
        require(ok, KEY, format!("a list with lr {lr}"), rule)?;
        let decay = weight_decay.unwrap_or(0.0);
        let ok = decay.is_finite() && decay >= 0.0;
        let rule = "a list of groups with weight_decay 0 or more and finite";
        require(ok, KEY, format!("a list with weight_decay {decay}"), rule)
    }
}

/// Refuses a group that no parameter of the model belongs to, which would silently have no effect.
///
/// # Errors
/// The first such group.
pub(super) fn check_groups(
    groups: &[ParamGroupConfig],
    model: &DecoderConfig,
) -> Result<(), TrainError> {
    if groups.is_empty() {
        return Ok(());
    }
    let plan = model.whole_plan()?;
    let of = |path: &str| groups.iter().position(|group| group.matches(path));
    let used: BTreeSet<usize> = plan.iter().filter_map(|(path, _)| of(path)).collect();
    for (number, group) in groups.iter().enumerate() {
        let value = || format!("a list with match {:?}", group.pattern);
        let rule = "a list of groups that each match a parameter which no earlier group matches; \
            `megaburn checkpoint ls` lists the parameters of a checkpoint";
        require(used.contains(&number), KEY, value(), rule)?;
    }
    Ok(())
}

/// Whether `text` fits `pattern`, in which `*` stands for any characters.
fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            let mut tails = text.char_indices().map(|(at, _)| &text[at..]);
            tails.any(|tail| fits(rest, tail)) || fits(rest, "")
        }),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::ConfigLayers;

    #[rstest]
    #[case("embedding.*", "embedding.weight", true)]
    #[case("embedding.*", "blocks.0.embedding.weight", false)]
    #[case("*.bias", "blocks.0.mlp.up.bias", true)]
    #[case("blocks.*.mlp.*", "blocks.11.mlp.down.weight", true)]
    #[case("blocks.*.mlp.*", "blocks.11.attention.qkv.weight", false)]
    #[case("norm.gamma", "norm.gamma", true)]
    #[case("norm", "norm.gamma", false)]
    #[case("*", "head.weight", true)]
    #[case("a*a", "a", false)]
    fn a_star_stands_for_any_characters(
        #[case] pattern: &str,
        #[case] path: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(fits(pattern, path), expected);
    }

    #[rstest]
    #[case("[{match=\"norm.*\",lr=1e-3},{match=\"blocks.0.*\",lr=1e-3}]", None)]
    #[case("[{match=\"*.mtp.*\",lr=1e-3}]", None)]
    #[case("[{match=\"block.*\",lr=1e-3}]", Some("block.*"))]
    #[case("[{match=\"*\",lr=1e-3},{match=\"norm.*\",lr=1e-4}]", Some("norm.*"))]
    fn a_group_without_parameters_is_refused(#[case] groups: &str, #[case] refused: Option<&str>) {
        let sets = [
            format!("optimizer.groups={groups}"),
            "model.mtp_layers=1".into(),
        ];
        let layers = sets.iter().fold(ConfigLayers::new(), |layers, set| {
            layers.with_set(set).unwrap()
        });
        let config = layers.load().unwrap();
        let model = config.model.decoder(config.data.seq_len, 260);
        let error = check_groups(&config.optimizer.groups, &model).err();
        let error = error.map(|error| error.to_string());
        assert_eq!(error.is_some(), refused.is_some(), "{error:?}");
        if let (Some(error), Some(pattern)) = (error, refused) {
            assert!(error.contains(&format!("{pattern:?}")), "{error}");
        }
    }

    #[rstest]
    #[case(
        "match = \"\"\nlr = 1.0",
        "`optimizer.groups` is a list with an empty match"
    )]
    #[case(
        "match = \"*\"",
        "is a list with match \"*\" alone: it must be a list of groups with lr"
    )]
    #[case("match = \"*\"\nlr = -1.0", "is a list with lr -1: it must be")]
    #[case(
        "match = \"*\"\nweight_decay = -0.5",
        "is a list with weight_decay -0.5"
    )]
    #[case("match = \"*\"\nrate = 1.0", "unknown field `rate`")]
    fn a_group_that_cannot_be_is_refused(#[case] lines: &str, #[case] message: &str) {
        let text = format!("[[optimizer.groups]]\n{lines}");
        let layers = ConfigLayers::new().with_text("g.toml", &text);
        let error = layers.and_then(ConfigLayers::load).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

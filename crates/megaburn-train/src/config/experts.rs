//! `[model.experts]`: the experts of a model.

use megaburn_models::decoder::Experts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{layer_pattern::LayerPattern, require::require};
use crate::error::TrainError;

/// `[model.experts]`: experts in place of the MLP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct ExpertsConfig {
    /// Number of experts per layer, without the shared expert.
    #[schemars(extend("minimum" = 1))]
    pub num: usize,
    /// Number of experts that each token is routed to; at most `num`.
    #[schemars(extend("minimum" = 1))]
    pub top_k: usize,
    /// Width inside an expert. Default: `model.ffn`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ffn: Option<usize>,
    /// Width inside the shared expert, which every token uses. Default: the width of an expert in
    /// families that have a shared one (qwen2_moe and the deepseeks); otherwise there is no shared
    /// expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_ffn: Option<usize>,
    /// Whether the shared expert's output is multiplied by a gate, the sigmoid of one logit per
    /// token. Default: the family's choice (yes in qwen2_moe).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_gate: Option<bool>,
    /// Whether the router adds a bias with a gradient to each logit. Default: the family's choice
    /// (yes in gpt_oss).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_bias: Option<bool>,
    /// Whether the weights of a token's experts are normalised to sum to one. Default: the family's
    /// choice (yes, except in qwen2_moe, olmoe and deepseek_v2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalise: Option<bool>,
    /// Factor on the weights of a token's experts, applied after `normalise`.
    pub scale: f64,
    /// Group-limited routing `[n_group, topk_group, scores_per_group]`, as in DeepSeek: the number
    /// of groups, which divides `num`; the groups that a token chooses from; and how many of its
    /// best scores make up the score of a group. Default: one group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<[usize; 3]>,
    /// Which layers have experts, in the notation of Megatron-LM's `--moe-layer-freq`: `"N"` for
    /// the first layer and every N-th after it, or a list such as `"([0]*1+[1]*3)"` with a 0 or 1
    /// for each layer.
    pub layer_freq: LayerPattern,
}

impl Default for ExpertsConfig {
    fn default() -> Self {
        Self {
            num: 8,
            top_k: 2,
            ffn: None,
            shared_ffn: None,
            shared_gate: None,
            router_bias: None,
            normalise: None,
            scale: 1.0,
            groups: None,
            layer_freq: LayerPattern::Every(1),
        }
    }
}

impl ExpertsConfig {
    /// The experts of a family with the defaults `parts`, in a model of `layers` layers whose MLPs
    /// are `ffn` wide.
    pub(super) fn experts(&self, parts: &Experts, ffn: usize, layers: usize) -> Experts {
        let ffn = self.ffn.unwrap_or(ffn);
        Experts {
            num: self.num,
            top_k: self.top_k,
            ffn,
            shared_ffn: self.shared_ffn.or(parts.shared_ffn.map(|_| ffn)),
            shared_gate: self.shared_gate.unwrap_or(parts.shared_gate),
            router_bias: self.router_bias.unwrap_or(parts.router_bias),
            normalise: self.normalise.unwrap_or(parts.normalise),
            scale: self.scale,
            groups: self.groups,
            dense_layers: self.layer_freq.layers_without(layers),
            ..parts.clone()
        }
    }

    /// The section that describes `experts` in a model of `layers` layers.
    pub(super) fn of(experts: &Experts, layers: usize) -> Self {
        Self {
            num: experts.num,
            top_k: experts.top_k,
            ffn: Some(experts.ffn),
            shared_ffn: experts.shared_ffn,
            shared_gate: Some(experts.shared_gate),
            router_bias: Some(experts.router_bias),
            normalise: Some(experts.normalise),
            scale: experts.scale,
            groups: experts.groups,
            layer_freq: LayerPattern::of(&experts.dense_layers, layers),
        }
    }

    pub(super) fn validate(&self, layers: usize) -> Result<(), TrainError> {
        let rule = format!("at most model.experts.num {}", self.num);
        require(
            self.top_k <= self.num,
            "model.experts.top_k",
            self.top_k,
            rule,
        )?;
        if let Some([groups, of_token, best]) = self.groups {
            let Self { num, top_k, .. } = *self;
            let size = num / groups.max(1);
            let is_split = groups > 0 && num.is_multiple_of(groups);
            let is_enough = (1..=groups).contains(&of_token) && top_k <= of_token * size;
            let ok = is_split && is_enough && (1..=size).contains(&best);
            let rule = format!(
                "three numbers: the number of groups, a divisor of model.experts.num {num}; the \
                number of groups that a token's experts are chosen from, with at least \
                model.experts.top_k {top_k} experts in total; and the number of best scores that \
                rank a group, at most its number of experts"
            );
            let value = format!("[{groups}, {of_token}, {best}]");
            require(ok, "model.experts.groups", value, rule)?;
        }
        self.layer_freq.validate("model.experts.layer_freq", layers)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case("[model]\nfamily = \"mixtral\"", "")]
    #[case(
        "[model]\nfamily = \"qwen3_moe\"\n[model.experts]\nlayer_freq = \"[0]*2+[1,1]\"",
        ""
    )]
    #[case("[model.experts]\nnum = 4", "")]
    #[case(
        "[model]\nfamily = \"mixtral\"\n[model.experts]\ntop_k = 9",
        "`model.experts.top_k` is 9: it must be at most"
    )]
    #[case(
        "[model]\nfamily = \"mixtral\"\n[model.experts]\nnum = 0",
        "`model.experts.num` is 0"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v3\"\n[model.experts]\ngroups = [3, 2, 2]",
        "`model.experts.groups` is [3, 2, 2]: it must be three numbers: the number of groups, a divisor of"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v3\"\n[model.experts]\ngroups = [4, 2, 9]",
        "`model.experts.groups` is [4, 2, 9]: it must be three numbers"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v3\"\n[model.experts]\ngroups = [8, 1, 1]",
        "`model.experts.groups` is [8, 1, 1]: it must be three numbers"
    )]
    #[case("[model]\nfamily = \"mixtral\"\n[model.experts]\nffn = 9", "")]
    #[case(
        "[model]\nfamily = \"mixtral\"\n[model.experts]\nlayer_freq = \"2\"",
        ""
    )]
    #[case(
        "[model]\nfamily = \"mixtral\"\n[model.experts]\nshared_ffn = 64\nshared_gate = true",
        ""
    )]
    #[case(
        "[moe]\naux_loss = -1",
        "`moe.aux_loss` is -1: it must be at least 0 and finite"
    )]
    fn experts_are_those_that_a_family_has(#[case] text: &str, #[case] message: &str) {
        let config = ConfigLayers::new()
            .with_text("m.toml", text)
            .and_then(ConfigLayers::load);
        match message {
            "" => drop(config.unwrap()),
            message => {
                let error = config.unwrap_err().to_string();
                assert!(error.contains(message), "{error}");
            }
        }
    }
}

//! `[model.parts]`: what a model's blocks consist of, where it differs from the family.

use megaburn_models::{
    DecoderConfig,
    decoder::{BlockOrder, NormPlacement, Positions, Relative, Rotary},
};
use megaburn_parallel::Alibi;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    layer_pattern::LayerPattern,
    part_names::{
        ACTIVATIONS, ActivationName, NORMS, NormName, PositionsName, QK_NORMS, QkNormName, name_of,
        named,
    },
    require::require,
};
use crate::error::TrainError;

/// `[model.parts]`: the parts of a model that differ from its family's. The default of each key is
/// the family's choice. A model whose family cannot express a part trains, saves, resumes and
/// generates, but cannot be exported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct ModelParts {
    /// The kind of norm: `rms` or `layer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<NormName>,
    /// Where the norms of a block are: `pre` (before attention and MLP), `output` (on their
    /// outputs, as in OLMo 2), `sandwich` (both, as in Gemma 2) or `post` (of the residual stream
    /// after them, as in BERT).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_placement: Option<NormPlacement>,
    /// Whether positions also see later ones, as in an encoder. Not with context parallelism.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bidirectional: Option<bool>,
    /// Whether the sum of the embeddings has a norm, as in BERT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_norm: Option<bool>,
    /// Number of token types, each with a learned vector (BERT's segments); 0 for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_types: Option<usize>,
    /// Whether the head of a masked language model is before the output matrix: a matrix, the
    /// activation, a norm, and a bias for each token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masked_head: Option<bool>,
    /// Whether the first token's output is classified as one of two classes: BERT's pooler and
    /// next-sentence head, which Megatron-LM's `--bert-no-binary-head` leaves out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binary_head: Option<bool>,
    /// Whether norms scale by `1 + gamma`, with gamma starting at zero (Megatron-LM's
    /// `--apply-layernorm-1p`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_centered_gamma: Option<bool>,
    /// How a block applies attention and MLP: `serial`, `parallel` (both read the same residual
    /// stream, as in GPT-NeoX) or `parallel_shared_norm` (they also share one norm, as in GPT-J).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_order: Option<BlockOrder>,
    /// The activation function of the MLP: gated `swiglu`, `geglu`, `geglu_tanh` or `clamped_swiglu`
    /// (gpt-oss), or `gelu`, `gelu_tanh`, `relu` or `squared_relu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<ActivationName>,
    /// Whether queries, keys and values have biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qkv_bias: Option<bool>,
    /// Whether the attention's output projection has a bias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_bias: Option<bool>,
    /// Whether the matrices of the MLP and of experts have biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlp_bias: Option<bool>,
    /// RMS norms of queries and keys: `none`, `head` (of each head, as in Qwen3), `width` (of all
    /// heads together, as in OLMo 2) or `l2` (of each head, without a learned scale).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_norm: Option<QkNormName>,
    /// Factor of the attention scores. Default: the family's, otherwise `1 / sqrt(head_dim)`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_scale: Option<f64>,
    /// Soft cap of attention scores: they become `cap * tanh(score / cap)` before the softmax. 0
    /// turns off that of the family.
    #[schemars(extend("minimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_soft_cap: Option<f64>,
    /// Whether each query head has a learned logit that takes part in its softmax without a value
    /// (Megatron-LM's `--softmax-type learnable`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_sinks: Option<bool>,
    /// Soft cap of logits: they become `cap * tanh(logit / cap)`. 0 turns off that of the
    /// family.
    #[schemars(extend("minimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits_soft_cap: Option<f64>,
    /// How positions enter the model: `rotary`, `learned`, `alibi`, `relative` (a learned bias of the
    /// scores by distance, as in T5) or `none`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub positions: Option<PositionsName>,
    /// Whether the bias of `alibi` is multiplied by the factor of the scores, as in Falcon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alibi_scaled: Option<bool>,
    /// Number of buckets of distances with `relative` (Megatron-LM's
    /// `--relative-attention-num-buckets`). Default: the family's, otherwise 32.
    #[schemars(extend("minimum" = 2))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relative_buckets: Option<usize>,
    /// Distance from which all share the last bucket with `relative` (Megatron-LM's
    /// `--relative-attention-max-distance`). Default: the family's, otherwise 128.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relative_max_distance: Option<usize>,
    /// Fraction of a head, from its start, that is rotated (Megatron-LM's `--rotary-percent`).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_percent: Option<f64>,
    /// Whether rotations pair neighbouring features instead of features of the two halves
    /// (Megatron-LM's `--rotary-interleaved`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_interleaved: Option<bool>,
    /// Base of the rotary frequencies, without scaling, in layers with a sliding window (Gemma 3).
    /// 0: `model.rope_theta`.
    #[schemars(extend("minimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_rope_theta: Option<f64>,
    /// Which layers rotate queries and keys: `"N"` for the first layer and every N-th after it, or
    /// a list such as `"([1]*3+[0]*1)*4"` with a 0 or 1 for each layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_layers: Option<LayerPattern>,
    /// Which layers use `model.window`, in the same notation; the others attend to all earlier
    /// positions. It needs `model.window`. Default: the family's choice, in most of them all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_layers: Option<LayerPattern>,
    /// Factor of the token embeddings.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_multiplier: Option<f64>,
    /// Factor of the outputs of attention and MLP, before they are added to the residual stream.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residual_multiplier: Option<f64>,
    /// Divisor of the logits (Granite).
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits_scaling: Option<f64>,
    /// Width of the model for which `optimizer.lr` and `init_std` were found (μP). The matrices in
    /// blocks then have fresh weights with `init_std / sqrt(m)` and a learning rate of `lr / m`, and
    /// logits are divided by `m`, where `m = model.hidden / mup_base_hidden`. Keep `head_dim`
    /// and the number of layers the same in both models, and let all other sizes grow with `hidden`.
    /// It needs `optimizer.name = "adamw"`.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mup_base_hidden: Option<usize>,
    /// Standard deviation of fresh weights (Megatron-LM's `--init-method-std`). Projections into
    /// the residual stream have `init_std / sqrt(2 layers)`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_std: Option<f64>,
}

/// The value of a key that 0 turns off.
fn unless_zero(value: Option<f64>, of_family: Option<f64>) -> Option<f64> {
    match value {
        Some(0.0) => None,
        Some(value) => Some(value),
        None => of_family,
    }
}

impl ModelParts {
    /// `family` with these parts, where both have `family.layers` layers.
    pub(super) fn applied_to(&self, family: DecoderConfig) -> DecoderConfig {
        let layers = family.layers;
        let without = |pattern: &LayerPattern| pattern.layers_without(layers);
        let mut multipliers = family.multipliers;
        multipliers.embedding = self.embedding_multiplier.unwrap_or(multipliers.embedding);
        multipliers.residual = self.residual_multiplier.unwrap_or(multipliers.residual);
        multipliers.logits_scaling = self.logits_scaling.unwrap_or(multipliers.logits_scaling);
        DecoderConfig {
            norm: named(&NORMS, self.norm, family.norm),
            norm_placement: self.norm_placement.unwrap_or(family.norm_placement),
            bidirectional: self.bidirectional.unwrap_or(family.bidirectional),
            embedding_norm: self.embedding_norm.unwrap_or(family.embedding_norm),
            token_types: self.token_types.unwrap_or(family.token_types),
            masked_head: self.masked_head.unwrap_or(family.masked_head),
            binary_head: self.binary_head.unwrap_or(family.binary_head),
            zero_centered_gamma: self
                .zero_centered_gamma
                .unwrap_or(family.zero_centered_gamma),
            block_order: self.block_order.unwrap_or(family.block_order),
            activation: named(&ACTIVATIONS, self.activation, family.activation),
            qkv_bias: self.qkv_bias.unwrap_or(family.qkv_bias),
            output_bias: self.output_bias.unwrap_or(family.output_bias),
            mlp_bias: self.mlp_bias.unwrap_or(family.mlp_bias),
            qk_norm: named(&QK_NORMS, self.qk_norm, family.qk_norm),
            attention_scale: self.attention_scale.or(family.attention_scale),
            attention_sinks: self.attention_sinks.unwrap_or(family.attention_sinks),
            attention_soft_cap: unless_zero(self.attention_soft_cap, family.attention_soft_cap),
            logits_soft_cap: unless_zero(self.logits_soft_cap, family.logits_soft_cap),
            full_layers: self
                .window_layers
                .as_ref()
                .map_or(family.full_layers.clone(), without),
            positions: self.positions(&family),
            multipliers,
            mup_base_hidden: self.mup_base_hidden.or(family.mup_base_hidden),
            init_std: self.init_std.unwrap_or(family.init_std),
            ..family
        }
    }

    fn positions(&self, family: &DecoderConfig) -> Positions {
        let rotary = || {
            let of_family = family.positions.rotary().cloned();
            let rotary = of_family.unwrap_or_else(|| Rotary::new(10_000.0));
            let layers = self.rotary_layers.as_ref();
            Positions::Rotary(Rotary {
                percent: self.rotary_percent.unwrap_or(rotary.percent),
                interleaved: self.rotary_interleaved.unwrap_or(rotary.interleaved),
                window_theta: unless_zero(self.window_rope_theta, rotary.window_theta),
                unrotated_layers: layers.map_or(rotary.unrotated_layers.clone(), |pattern| {
                    pattern.layers_without(family.layers)
                }),
                ..rotary
            })
        };
        match (self.positions, &family.positions) {
            (Some(PositionsName::Alibi), _) | (None, Positions::Alibi(_)) => {
                let of_family = family.positions.alibi().unwrap_or_else(Alibi::new);
                let scaled = self.alibi_scaled.unwrap_or(of_family.scaled);
                Positions::Alibi(of_family.with_scaled(scaled))
            }
            (Some(PositionsName::Relative), _) | (None, Positions::Relative(_)) => {
                let of_family = family.positions.relative().unwrap_or_default();
                Positions::Relative(Relative {
                    num_buckets: self.relative_buckets.unwrap_or(of_family.num_buckets),
                    max_distance: self.relative_max_distance.unwrap_or(of_family.max_distance),
                })
            }
            (Some(PositionsName::Learned), _) | (None, Positions::Learned) => Positions::Learned,
            (Some(PositionsName::None), _) | (None, Positions::None) => Positions::None,
            (Some(PositionsName::Rotary), _) | (None, Positions::Rotary(_)) => rotary(),
        }
    }

    /// The section that makes `model` of `family`; `None` if they have the same parts.
    pub(super) fn of(model: &DecoderConfig, family: &DecoderConfig) -> Option<Self> {
        let [mine, other] = [model, family].map(|of| json!(Self::all_of(of)));
        let keys = mine.as_object().into_iter().flatten();
        let changed: Map<String, Value> = keys
            .filter(|(key, value)| other.get(key.as_str()) != Some(value))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let parts = serde_json::from_value(changed.into()).expect("they are keys of the section");
        (parts != Self::default()).then_some(parts)
    }

    /// The section with every key that applies to `model`.
    pub(super) fn all_of(model: &DecoderConfig) -> Self {
        let rotary = model.positions.rotary();
        let relative = model.positions.relative();
        let pattern = |without: &[usize]| LayerPattern::of(without, model.layers);
        Self {
            norm: name_of(&NORMS, model.norm),
            norm_placement: Some(model.norm_placement),
            bidirectional: Some(model.bidirectional),
            embedding_norm: Some(model.embedding_norm),
            token_types: Some(model.token_types),
            masked_head: Some(model.masked_head),
            binary_head: Some(model.binary_head),
            zero_centered_gamma: Some(model.zero_centered_gamma),
            block_order: Some(model.block_order),
            activation: name_of(&ACTIVATIONS, model.activation),
            qkv_bias: Some(model.qkv_bias),
            output_bias: Some(model.output_bias),
            mlp_bias: Some(model.mlp_bias),
            qk_norm: name_of(&QK_NORMS, model.qk_norm),
            attention_scale: model.attention_scale,
            attention_soft_cap: Some(model.attention_soft_cap.unwrap_or(0.0)),
            attention_sinks: Some(model.attention_sinks),
            logits_soft_cap: Some(model.logits_soft_cap.unwrap_or(0.0)),
            positions: Some(kind(model)),
            alibi_scaled: model.positions.alibi().map(|alibi| alibi.scaled),
            relative_buckets: relative.map(|relative| relative.num_buckets),
            relative_max_distance: relative.map(|relative| relative.max_distance),
            rotary_percent: rotary.map(|rotary| rotary.percent),
            rotary_interleaved: rotary.map(|rotary| rotary.interleaved),
            window_rope_theta: rotary
                .filter(|_| model.window.is_some())
                .map(|rotary| rotary.window_theta.unwrap_or(0.0)),
            rotary_layers: rotary.map(|rotary| pattern(&rotary.unrotated_layers)),
            window_layers: model.window.map(|_| pattern(&model.full_layers)),
            embedding_multiplier: Some(model.multipliers.embedding),
            residual_multiplier: Some(model.multipliers.residual),
            logits_scaling: Some(model.multipliers.logits_scaling),
            mup_base_hidden: model.mup_base_hidden,
            init_std: Some(model.init_std),
        }
    }

    /// The keys that are set, without biases, norms of heads and the deviation of fresh weights.
    pub(super) fn besides_biases(&self) -> Vec<String> {
        let rest = Self {
            qkv_bias: None,
            output_bias: None,
            mlp_bias: None,
            qk_norm: self.qk_norm.filter(|norm| *norm != QkNormName::Head),
            init_std: None,
            ..self.clone()
        };
        let json = json!(rest);
        let keys = json.as_object().into_iter().flat_map(|keys| keys.keys());
        keys.cloned().collect()
    }

    /// Checks the parts of a model with `layers` layers. Keys of other positions than those of
    /// the model are refused.
    pub(super) fn validate(&self, layers: usize, positions: &Positions) -> Result<(), TrainError> {
        let is_rotary = positions.rotary().is_some();
        let rule = "absent, because the model has no ALiBi";
        let is_absent = positions.alibi().is_some() || self.alibi_scaled.is_none();
        require(is_absent, "model.parts.alibi_scaled", "set", rule)?;
        let of_relative = [
            (
                "model.parts.relative_buckets",
                self.relative_buckets.is_some(),
            ),
            (
                "model.parts.relative_max_distance",
                self.relative_max_distance.is_some(),
            ),
        ];
        for (key, is_set) in of_relative {
            let rule = "absent, because the model has no relative positions";
            let is_absent = positions.relative().is_some() || !is_set;
            require(is_absent, key, "set", rule)?;
        }
        let of_rotary = [
            ("model.parts.rotary_percent", self.rotary_percent.is_some()),
            (
                "model.parts.rotary_interleaved",
                self.rotary_interleaved.is_some(),
            ),
            (
                "model.parts.window_rope_theta",
                self.window_rope_theta.is_some(),
            ),
            ("model.parts.rotary_layers", self.rotary_layers.is_some()),
        ];
        for (key, is_set) in of_rotary {
            let rule = "absent, because the model has no rotary positions";
            require(is_rotary || !is_set, key, "set", rule)?;
        }
        let patterns = [
            ("model.parts.rotary_layers", &self.rotary_layers),
            ("model.parts.window_layers", &self.window_layers),
        ];
        for (key, pattern) in patterns {
            pattern
                .as_ref()
                .map_or(Ok(()), |pattern| pattern.validate(key, layers))?;
        }
        Ok(())
    }
}

fn kind(model: &DecoderConfig) -> PositionsName {
    match model.positions {
        Positions::Rotary(_) => PositionsName::Rotary,
        Positions::Learned => PositionsName::Learned,
        Positions::Alibi(_) => PositionsName::Alibi,
        Positions::Relative(_) => PositionsName::Relative,
        Positions::None => PositionsName::None,
    }
}

//! `[model.parts]`: what a model's blocks consist of, where it differs from the family.

use megaburn_models::{
    DecoderConfig,
    decoder::{BlockOrder, NormPlacement, Positions, Rotary},
};
use megaburn_parallel::{Activation, NormKind, QkNormKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{layer_pattern::LayerPattern, require::require};
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
    /// outputs, as in OLMo 2) or `sandwich` (both, as in Gemma 2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_placement: Option<NormPlacement>,
    /// Whether norms scale by `1 + gamma`, with gamma starting at zero (Megatron-LM's
    /// `--apply-layernorm-1p`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_centered_gamma: Option<bool>,
    /// How a block applies attention and MLP: `serial`, `parallel` (both read the same residual
    /// stream, as in GPT-NeoX) or `parallel_shared_norm` (they also share one norm, as in GPT-J).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_order: Option<BlockOrder>,
    /// The activation function of the MLP: gated `swiglu`, `geglu` or `geglu_tanh`, or `gelu`,
    /// `gelu_tanh`, `relu` or `squared_relu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<ActivationName>,
    /// Whether queries, keys and values have biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qkv_bias: Option<bool>,
    /// Whether the attention's output projection has a bias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_bias: Option<bool>,
    /// Whether the matrices of the MLP have biases.
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
    /// Soft cap of attention scores: they become `cap * tanh(score / cap)` before the softmax.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_soft_cap: Option<f64>,
    /// Soft cap of logits: they become `cap * tanh(logit / cap)`. It cannot be used with
    /// `train.fused_linear_cross_entropy`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits_soft_cap: Option<f64>,
    /// How positions enter the model: `rotary`, `learned` or `none`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub positions: Option<PositionsName>,
    /// Fraction of a head, from its start, that is rotated (Megatron-LM's `--rotary-percent`).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_percent: Option<f64>,
    /// Whether rotations pair neighbouring features instead of features of the two halves
    /// (Megatron-LM's `--rotary-interleaved`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_interleaved: Option<bool>,
    /// Base of the rotary frequencies, without scaling, in layers with a sliding window (Gemma 3).
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_rope_theta: Option<f64>,
    /// Which layers rotate queries and keys: `"N"` for the first layer and every N-th after it, or
    /// a list such as `"([1]*3+[0]*1)*4"` with a 0 or 1 for each layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_layers: Option<LayerPattern>,
    /// Which layers use `model.window`, in the same notation; the others attend to all earlier
    /// positions. Default: all layers.
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
    /// Standard deviation of fresh weights (Megatron-LM's `--init-method-std`). Projections into
    /// the residual stream have `init_std / sqrt(2 layers)`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_std: Option<f64>,
}

/// A kind of norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum NormName {
    /// RMSNorm.
    Rms,
    /// LayerNorm, with a shift.
    Layer,
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum ActivationName {
    /// Gated SiLU.
    #[serde(rename = "swiglu")]
    SwiGlu,
    /// Gated GELU.
    #[serde(rename = "geglu")]
    GeGlu,
    /// Gated GELU by the tanh approximation.
    #[serde(rename = "geglu_tanh")]
    GeGluTanh,
    /// GELU.
    Gelu,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// ReLU.
    Relu,
    /// The square of ReLU.
    SquaredRelu,
}

/// What is normalised of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum QkNormName {
    /// Nothing.
    None,
    /// Each head, with a scale that heads share.
    Head,
    /// All heads together.
    Width,
    /// Each head, without a scale.
    L2,
}

/// How positions enter a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum PositionsName {
    /// Queries and keys are rotated.
    Rotary,
    /// Learned vectors are added to the token embeddings.
    Learned,
    /// Not at all.
    None,
}

const NORMS: [(NormName, NormKind); 2] = [
    (NormName::Rms, NormKind::Rms),
    (NormName::Layer, NormKind::Layer),
];

const ACTIVATIONS: [(ActivationName, Activation); 7] = [
    (ActivationName::SwiGlu, Activation::SwiGlu),
    (ActivationName::GeGlu, Activation::GeGlu),
    (ActivationName::GeGluTanh, Activation::GeGluTanh),
    (ActivationName::Gelu, Activation::Gelu),
    (ActivationName::GeluTanh, Activation::GeluTanh),
    (ActivationName::Relu, Activation::Relu),
    (ActivationName::SquaredRelu, Activation::SquaredRelu),
];

const QK_NORMS: [(QkNormName, Option<QkNormKind>); 4] = [
    (QkNormName::None, None),
    (QkNormName::Head, Some(QkNormKind::Head)),
    (QkNormName::Width, Some(QkNormKind::Width)),
    (QkNormName::L2, Some(QkNormKind::L2)),
];

/// The value that belongs to a name.
fn named<N: Copy + PartialEq, V: Copy>(table: &[(N, V)], name: Option<N>, default: V) -> V {
    let found = table.iter().find(|(known, _)| Some(*known) == name);
    found.map_or(default, |(_, value)| *value)
}

/// The name of a value.
fn name_of<N: Copy, V: Copy + PartialEq>(table: &[(N, V)], value: V) -> Option<N> {
    let found = table.iter().find(|(_, known)| *known == value);
    found.map(|(name, _)| *name)
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
            attention_soft_cap: self.attention_soft_cap.or(family.attention_soft_cap),
            logits_soft_cap: self.logits_soft_cap.or(family.logits_soft_cap),
            full_layers: self
                .window_layers
                .as_ref()
                .map_or(family.full_layers.clone(), without),
            positions: self.positions(&family),
            multipliers,
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
                window_theta: self.window_rope_theta.or(rotary.window_theta),
                unrotated_layers: layers.map_or(rotary.unrotated_layers.clone(), |pattern| {
                    pattern.layers_without(family.layers)
                }),
                ..rotary
            })
        };
        match (self.positions, &family.positions) {
            (Some(PositionsName::Learned), _) | (None, Positions::Learned) => Positions::Learned,
            (Some(PositionsName::None), _) | (None, Positions::None) => Positions::None,
            (Some(PositionsName::Rotary), _) | (None, Positions::Rotary(_)) => rotary(),
        }
    }

    /// The section that makes `model` of `family`; `None` if they have the same parts.
    pub(super) fn of(model: &DecoderConfig, family: &DecoderConfig) -> Option<Self> {
        fn changed<T: PartialEq + Clone>(mine: &T, other: &T) -> Option<T> {
            (mine != other).then(|| mine.clone())
        }
        fn set<T: PartialEq + Copy>(mine: Option<T>, other: Option<T>) -> Option<T> {
            mine.filter(|_| mine != other)
        }
        let pattern = |mine: &[usize], other: &[usize]| {
            (mine != other).then(|| LayerPattern::of(mine, model.layers))
        };
        let [mine, other] = [model, family].map(|of| of.positions.rotary().cloned());
        let rotary = mine.as_ref();
        let plain = other.unwrap_or_else(|| Rotary::new(10_000.0));
        let factors = [model.multipliers, family.multipliers];
        let factor = |of: fn(&megaburn_models::decoder::Multipliers) -> f64| {
            changed(&of(&factors[0]), &of(&factors[1]))
        };
        let parts = Self {
            norm: changed(&model.norm, &family.norm).and_then(|norm| name_of(&NORMS, norm)),
            norm_placement: changed(&model.norm_placement, &family.norm_placement),
            zero_centered_gamma: changed(&model.zero_centered_gamma, &family.zero_centered_gamma),
            block_order: changed(&model.block_order, &family.block_order),
            activation: changed(&model.activation, &family.activation)
                .and_then(|activation| name_of(&ACTIVATIONS, activation)),
            qkv_bias: changed(&model.qkv_bias, &family.qkv_bias),
            output_bias: changed(&model.output_bias, &family.output_bias),
            mlp_bias: changed(&model.mlp_bias, &family.mlp_bias),
            qk_norm: changed(&model.qk_norm, &family.qk_norm)
                .and_then(|norm| name_of(&QK_NORMS, norm)),
            attention_scale: set(model.attention_scale, family.attention_scale),
            attention_soft_cap: set(model.attention_soft_cap, family.attention_soft_cap),
            logits_soft_cap: set(model.logits_soft_cap, family.logits_soft_cap),
            positions: (kind(model) != kind(family)).then(|| kind(model)),
            rotary_percent: rotary.and_then(|rotary| changed(&rotary.percent, &plain.percent)),
            rotary_interleaved: rotary
                .and_then(|rotary| changed(&rotary.interleaved, &plain.interleaved)),
            window_rope_theta: rotary
                .and_then(|rotary| set(rotary.window_theta, plain.window_theta)),
            rotary_layers: rotary
                .and_then(|rotary| pattern(&rotary.unrotated_layers, &plain.unrotated_layers)),
            window_layers: pattern(&model.full_layers, &family.full_layers),
            embedding_multiplier: factor(|of| of.embedding),
            residual_multiplier: factor(|of| of.residual),
            logits_scaling: factor(|of| of.logits_scaling),
            init_std: changed(&model.init_std, &family.init_std),
        };
        (parts != Self::default()).then_some(parts)
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
        let json = serde_json::json!(rest);
        let keys = json.as_object().into_iter().flat_map(|keys| keys.keys());
        keys.cloned().collect()
    }

    /// Checks the parts of a model with `layers` layers. Keys of rotary positions are refused unless
    /// the model has them.
    pub(super) fn validate(&self, layers: usize, is_rotary: bool) -> Result<(), TrainError> {
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
        Positions::None => PositionsName::None,
    }
}

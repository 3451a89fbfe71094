//! The names of choices in `[model.parts]`, and what they stand for.

use megaburn_parallel::{Activation, NormKind, QkNormKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// Gated SiLU with limited inputs and one added to the ungated half.
    #[serde(rename = "clamped_swiglu")]
    ClampedSwiGlu,
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
    /// Attention scores fall with the distance between query and key.
    Alibi,
    /// Attention scores have a learned bias by the distance between query and key.
    Relative,
    /// Not at all.
    None,
}

pub(super) const NORMS: [(NormName, NormKind); 2] = [
    (NormName::Rms, NormKind::Rms),
    (NormName::Layer, NormKind::Layer),
];

pub(super) const ACTIVATIONS: [(ActivationName, Activation); 8] = [
    (ActivationName::SwiGlu, Activation::SwiGlu),
    (ActivationName::GeGlu, Activation::GeGlu),
    (ActivationName::GeGluTanh, Activation::GeGluTanh),
    (ActivationName::ClampedSwiGlu, Activation::ClampedSwiGlu),
    (ActivationName::Gelu, Activation::Gelu),
    (ActivationName::GeluTanh, Activation::GeluTanh),
    (ActivationName::Relu, Activation::Relu),
    (ActivationName::SquaredRelu, Activation::SquaredRelu),
];

pub(super) const QK_NORMS: [(QkNormName, Option<QkNormKind>); 4] = [
    (QkNormName::None, None),
    (QkNormName::Head, Some(QkNormKind::Head)),
    (QkNormName::Width, Some(QkNormKind::Width)),
    (QkNormName::L2, Some(QkNormKind::L2)),
];

/// The value that belongs to a name.
pub(super) fn named<N: Copy + PartialEq, V: Copy>(
    table: &[(N, V)],
    name: Option<N>,
    default: V,
) -> V {
    let found = table.iter().find(|(known, _)| Some(*known) == name);
    found.map_or(default, |(_, value)| *value)
}

/// The name of a value.
pub(super) fn name_of<N: Copy, V: Copy + PartialEq>(table: &[(N, V)], value: V) -> Option<N> {
    let found = table.iter().find(|(_, known)| *known == value);
    found.map(|(name, _)| *name)
}

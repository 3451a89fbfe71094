//! The choices of a block beyond its sizes.

use megaburn_parallel::QkNormKind;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Where the norms of a block are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum NormPlacement {
    /// Before attention and MLP: `x + f(norm(x))` (GPT-2, Llama).
    #[default]
    Pre,
    /// On the outputs of attention and MLP: `x + norm(f(x))` (OLMo 2).
    Output,
    /// Both: `x + norm(f(norm(x)))` (Gemma 2 and 3).
    Sandwich,
    /// On the residual stream: `norm(x + f(x))`, without a norm after the last block (the original
    /// transformer, BERT).
    Post,
}

impl NormPlacement {
    /// Whether attention and MLP read a norm of the residual stream.
    pub fn has_input_norms(self) -> bool {
        matches!(self, Self::Pre | Self::Sandwich)
    }

    /// Whether a norm follows attention and MLP. It normalises their outputs or the residual stream.
    pub fn has_output_norms(self) -> bool {
        self != Self::Pre
    }

    /// Whether a norm follows the last block.
    pub fn has_last_norm(self) -> bool {
        self != Self::Post
    }
}

/// In what order a block applies attention and MLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum BlockOrder {
    /// The MLP reads the residual stream after the attention.
    #[default]
    Serial,
    /// Attention and MLP read the same residual stream, each through its own norm:
    /// `x + attention(norm1(x)) + mlp(norm2(x))` (GPT-NeoX, Falcon 40B).
    Parallel,
    /// As `Parallel`, with one norm for both (GPT-J, Falcon 7B, Phi-2).
    ParallelSharedNorm,
}

/// Constant factors of a model (Granite, Gemma, μP).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Multipliers {
    /// Factor of the token embeddings.
    pub embedding: f64,
    /// Factor of the outputs of attention and MLP, before they are added to the residual stream.
    pub residual: f64,
    /// Divisor of the logits.
    pub logits_scaling: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self {
            embedding: 1.0,
            residual: 1.0,
            logits_scaling: 1.0,
        }
    }
}

/// Whether a field has its default value, so that it is not written.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Writes the norms of queries and keys. The form of earlier versions, which only had norms of
/// heads, is kept for these: whether each head has one.
#[expect(clippy::ref_option, reason = "serde passes a reference")]
pub(super) fn write_qk_norm<S: Serializer>(
    kind: &Option<QkNormKind>,
    into: S,
) -> Result<S::Ok, S::Error> {
    match kind {
        None => false.serialize(into),
        Some(QkNormKind::Head) => true.serialize(into),
        Some(kind) => kind.serialize(into),
    }
}

/// Reads what [`write_qk_norm`] writes.
pub(super) fn read_qk_norm<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<QkNormKind>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        OfHeads(bool),
        Kind(QkNormKind),
    }
    Ok(match Written::deserialize(from)? {
        Written::OfHeads(has_norms) => has_norms.then_some(QkNormKind::Head),
        Written::Kind(kind) => Some(kind),
    })
}

//! How positions enter a model.

use megaburn_kernels::RopeScaling;
use megaburn_parallel::Alibi;
use serde::{Deserialize, Serialize};

/// How positions enter a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Positions {
    /// Rotary embeddings (RoPE): queries and keys are rotated by their position.
    Rotary(Rotary),
    /// A learned vector per position is added to the token embedding; there are `max_seq_len` of
    /// them.
    Learned,
    /// ALiBi: attention scores fall with the distance between query and key.
    Alibi(Alibi),
    /// A learned bias of the attention scores for each head and distance between query and key (T5).
    Relative(Relative),
    /// Nothing: the causal mask alone orders the tokens (Megatron's
    /// `--position-embedding-type none`).
    None,
}

/// The relative bias of a model: distances share the bias of their bucket. All blocks that see the
/// same positions share one table, of shape `[num_buckets, heads]`: one table for the encoder, and
/// one for the decoder. Cross attention has no bias.
///
/// Source: Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
/// transformer" (2020), section 2.1, <https://arxiv.org/abs/1910.10683>; Megatron's
/// `--position-embedding-type relative`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relative {
    /// Number of buckets (Megatron's `--relative-attention-num-buckets`).
    pub num_buckets: usize,
    /// Distance from which all share the last bucket (Megatron's
    /// `--relative-attention-max-distance`).
    pub max_distance: usize,
}

impl Default for Relative {
    fn default() -> Self {
        Self {
            num_buckets: 32,
            max_distance: 128,
        }
    }
}

/// The rotary embeddings of a model.
///
/// Source: Su et al., "RoFormer" (2021), <https://arxiv.org/abs/2104.09864>.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rotary {
    /// Base of the frequencies.
    pub theta: f64,
    /// RoPE scaling: changes the frequencies for longer contexts.
    pub scaling: RopeScaling,
    /// Fraction of a head, from its start, that is rotated (Megatron's `--rotary-percent`).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub percent: f64,
    /// Whether neighbouring features form pairs, instead of features of the two halves (Megatron's
    /// `--rotary-interleaved`). Latent attention has its own field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interleaved: bool,
    /// Base of the frequencies, without scaling, in layers with a sliding window (Gemma 3); `None`
    /// if all layers have the same frequencies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_theta: Option<f64>,
    /// Layers that rotate nothing (Megatron's `--no-rope-freq`, SmolLM 3, Llama 4).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrotated_layers: Vec<usize>,
}

impl Rotary {
    /// Whole heads, rotated in halves with the frequencies of `theta`.
    pub fn new(theta: f64) -> Self {
        Self {
            theta,
            scaling: RopeScaling::None,
            percent: 1.0,
            interleaved: false,
            window_theta: None,
            unrotated_layers: Vec::new(),
        }
    }

    /// The same positions, rotating only this fraction of each head.
    #[must_use]
    pub fn with_percent(self, percent: f64) -> Self {
        Self { percent, ..self }
    }

    /// Sets the scaling of the frequencies.
    pub fn with_scaling(self, scaling: RopeScaling) -> Self {
        Self { scaling, ..self }
    }
}

impl Positions {
    /// The rotary embeddings, if the model has them.
    pub fn rotary(&self) -> Option<&Rotary> {
        match self {
            Self::Rotary(rotary) => Some(rotary),
            Self::Learned | Self::Alibi(_) | Self::Relative(_) | Self::None => None,
        }
    }
}

impl Positions {
    /// Whether attention needs tables of the positions of its tokens.
    pub(super) fn has_tables(&self) -> bool {
        matches!(self, Self::Rotary(_) | Self::Alibi(_))
    }

    /// The form of ALiBi, if the model has it.
    pub fn alibi(&self) -> Option<Alibi> {
        match self {
            Self::Alibi(alibi) => Some(*alibi),
            Self::Learned | Self::Rotary(_) | Self::Relative(_) | Self::None => None,
        }
    }

    /// The relative bias, if the model has it.
    pub fn relative(&self) -> Option<Relative> {
        match self {
            Self::Relative(relative) => Some(*relative),
            Self::Learned | Self::Rotary(_) | Self::Alibi(_) | Self::None => None,
        }
    }
}

fn one() -> f64 {
    1.0
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

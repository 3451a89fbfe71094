use megaburn_kernels::{LongRopeScaling, RopeScaling, YarnScaling};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// `[model.rope_scaling]`: scaling of rotary frequencies for longer contexts. The keys have Hugging
/// Face's names; the defaults are Llama 3.1's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct RopeScalingConfig {
    /// The formula: `llama3`, `linear`, `yarn`, `longrope` or `dynamic`. `linear` uses only `factor`.
    pub kind: RopeScalingKind,
    /// Factor by which the lowest frequencies are divided, i.e. their wavelengths multiplied; at
    /// least 1.
    #[schemars(extend("minimum" = 1, "x-rule" = "at least 1 and finite"))]
    pub factor: f64,
    /// `llama3`: wavelengths longer than `original_max_position_embeddings / low_freq_factor` are
    /// multiplied by the full `factor`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub low_freq_factor: f64,
    /// `llama3`: wavelengths shorter than `original_max_position_embeddings / high_freq_factor`
    /// stay unchanged. It is above `low_freq_factor`.
    pub high_freq_factor: f64,
    /// Context length in tokens for which the unscaled frequencies were made. Not used
    /// with `linear`.
    #[schemars(extend("minimum" = 1))]
    pub original_max_position_embeddings: usize,
    /// `yarn`: frequencies with at least this many rotations within the original context stay
    /// unchanged. It is above `beta_slow`.
    pub beta_fast: f64,
    /// `yarn`: frequencies with at most this many rotations within the original context are divided
    /// by the full `factor`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub beta_slow: f64,
    /// `yarn`: rotated queries and keys are multiplied by `(0.1 mscale ln(factor) + 1) / (0.1
    /// mscale_all_dim ln(factor) + 1)` if both keys are set and not 0. Default: `0.1 ln(factor) +
    /// 1`.
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale: Option<f64>,
    /// `yarn`: see `mscale`. In the deepseeks, attention scores are also multiplied by `(0.1
    /// mscale_all_dim ln(factor) + 1)^2`. Default: no factor on the scores.
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale_all_dim: Option<f64>,
    /// `yarn` and `longrope`: the factor on rotated queries and keys, instead of the one that follows
    /// from `mscale` and `mscale_all_dim`, or from `factor`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
    /// `yarn`: whether the ramp between `beta_fast` and `beta_slow` begins and ends at integer pair
    /// indices.
    pub truncate: bool,
    /// `longrope`: the divisors of the frequencies in sequences within the original context, one for
    /// each pair of rotated features.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub short_factor: Vec<f64>,
    /// `longrope`: the divisors in longer sequences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub long_factor: Vec<f64>,
}

/// The formula that scales rotary frequencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum RopeScalingKind {
    /// Llama 3.1's formula: low frequencies are divided by the factor, high ones stay unchanged,
    /// with a ramp between them.
    #[default]
    Llama3,
    /// All frequencies are divided by the factor; the other keys are not used.
    Linear,
    /// YaRN: a ramp over the pairs of features, and a factor on the rotated queries and keys.
    Yarn,
    /// LongRoPE (Phi-3): a divisor for each frequency, other ones in long sequences, and a factor on
    /// the rotated queries and keys.
    LongRope,
    /// Dynamic NTK: the base grows with the length of sequences beyond the original context.
    Dynamic,
}

impl Default for RopeScalingConfig {
    fn default() -> Self {
        Self {
            kind: RopeScalingKind::Llama3,
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: None,
            mscale_all_dim: None,
            attention_factor: None,
            truncate: true,
            short_factor: Vec::new(),
            long_factor: Vec::new(),
        }
    }
}

impl RopeScalingConfig {
    pub(super) fn scaling(&self) -> RopeScaling {
        match self.kind {
            RopeScalingKind::Linear => RopeScaling::Linear {
                factor: self.factor,
            },
            RopeScalingKind::Llama3 => RopeScaling::Llama3 {
                factor: self.factor,
                low_freq_factor: self.low_freq_factor,
                high_freq_factor: self.high_freq_factor,
                original_max_position: self.original_max_position_embeddings,
            },
            RopeScalingKind::LongRope => RopeScaling::Long(LongRopeScaling {
                short_factor: self.short_factor.clone(),
                long_factor: self.long_factor.clone(),
                original_max_position: self.original_max_position_embeddings,
                factor: self.factor,
                attention_factor: self.attention_factor,
            }),
            RopeScalingKind::Dynamic => RopeScaling::Dynamic {
                factor: self.factor,
                original_max_position: self.original_max_position_embeddings,
            },
            RopeScalingKind::Yarn => RopeScaling::Yarn(YarnScaling {
                factor: self.factor,
                original_max_position: self.original_max_position_embeddings,
                beta_fast: self.beta_fast,
                beta_slow: self.beta_slow,
                mscale: self.mscale,
                mscale_all_dim: self.mscale_all_dim,
                attention_factor: self.attention_factor,
                truncate: self.truncate,
            }),
        }
    }

    pub(super) fn of(scaling: &RopeScaling) -> Option<Self> {
        match scaling.clone() {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } => Some(Self {
                kind: RopeScalingKind::Linear,
                factor,
                ..Self::default()
            }),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => Some(Self {
                kind: RopeScalingKind::Llama3,
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original_max_position,
                ..Self::default()
            }),
            RopeScaling::Long(long) => Some(Self {
                kind: RopeScalingKind::LongRope,
                factor: long.factor,
                original_max_position_embeddings: long.original_max_position,
                attention_factor: long.attention_factor,
                short_factor: long.short_factor,
                long_factor: long.long_factor,
                ..Self::default()
            }),
            RopeScaling::Dynamic {
                factor,
                original_max_position,
            } => Some(Self {
                kind: RopeScalingKind::Dynamic,
                factor,
                original_max_position_embeddings: original_max_position,
                ..Self::default()
            }),
            RopeScaling::Yarn(yarn) => Some(Self {
                kind: RopeScalingKind::Yarn,
                factor: yarn.factor,
                original_max_position_embeddings: yarn.original_max_position,
                beta_fast: yarn.beta_fast,
                beta_slow: yarn.beta_slow,
                mscale: yarn.mscale,
                mscale_all_dim: yarn.mscale_all_dim,
                attention_factor: yarn.attention_factor,
                truncate: yarn.truncate,
                ..Self::default()
            }),
        }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let low = self.low_freq_factor;
        let high = self.high_freq_factor;
        let rule = format!("finite and more than low_freq_factor {low}");
        let ok = high > low && high.is_finite();
        require(ok, "model.rope_scaling.high_freq_factor", high, rule)?;
        let slow = self.beta_slow;
        let fast = self.beta_fast;
        let rule = format!("finite and more than beta_slow {slow}");
        let ok = fast > slow && fast.is_finite();
        require(ok, "model.rope_scaling.beta_fast", fast, rule)
    }
}

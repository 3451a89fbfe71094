use megaburn_kernels::{RopeScaling, YarnScaling};
use serde::{Deserialize, Serialize};

use super::rules::{at_least_one, positive, require};
use crate::TrainError;

/// `[model.rope_scaling]`, under Hugging Face's names; the defaults are Llama 3.1's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RopeScalingConfig {
    /// Which formula.
    pub kind: RopeScalingKind,
    /// How many times longer the low frequencies' waves become.
    pub factor: f64,
    /// Llama 3's: waves longer than the original context over this are stretched in full.
    pub low_freq_factor: f64,
    /// Llama 3's: waves shorter than the original context over this stay as they are.
    pub high_freq_factor: f64,
    /// Tokens of context that the frequencies were made for.
    pub original_max_position_embeddings: usize,
    /// YaRN's: frequencies of more turns within the original context stay as they are.
    pub beta_fast: f64,
    /// YaRN's: frequencies of fewer turns are stretched in full.
    pub beta_slow: f64,
    /// YaRN's: how much what is rotated grows with the factor's logarithm. Default: as with 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale: Option<f64>,
    /// YaRN's: how much of that growth is the scores', which DeepSeek lets grow as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale_all_dim: Option<f64>,
    /// YaRN's: what is rotated is multiplied by this. Default: what follows from the two before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
    /// YaRN's: whether its ramp begins and ends at whole pairs of features.
    pub truncate: bool,
}

/// The formula that stretches rotary frequencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeScalingKind {
    /// Llama 3.1's: low frequencies divided by the factor, high ones kept, a ramp between them.
    #[default]
    Llama3,
    /// All frequencies divided by the factor; the other keys are not used.
    Linear,
    /// YaRN's: a ramp over the pairs of features, and scores that grow.
    Yarn,
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
        let Self {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            ..
        } = *self;
        let rule = "at least 1 and finite";
        require(
            factor >= 1.0 && factor.is_finite(),
            "model.rope_scaling.factor",
            factor,
            rule,
        )?;
        positive("model.rope_scaling.low_freq_factor", low)?;
        let rule = format!("finite and more than low_freq_factor {low}");
        let ok = high > low && high.is_finite();
        require(ok, "model.rope_scaling.high_freq_factor", high, rule)?;
        let slow = self.beta_slow;
        let fast = self.beta_fast;
        positive("model.rope_scaling.beta_slow", slow)?;
        let rule = format!("finite and more than beta_slow {slow}");
        let ok = fast > slow && fast.is_finite();
        require(ok, "model.rope_scaling.beta_fast", fast, rule)?;
        if let Some(factor) = self.attention_factor {
            positive("model.rope_scaling.attention_factor", factor)?;
        }
        let scales = [
            ("model.rope_scaling.mscale", self.mscale),
            ("model.rope_scaling.mscale_all_dim", self.mscale_all_dim),
        ];
        for (key, scale) in scales {
            let scale = scale.unwrap_or(0.0);
            require(
                scale >= 0.0 && scale.is_finite(),
                key,
                scale,
                "at least 0 and finite",
            )?;
        }
        let original = self.original_max_position_embeddings;
        at_least_one(
            "model.rope_scaling.original_max_position_embeddings",
            original,
        )
    }
}

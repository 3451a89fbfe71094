use megaburn_kernels::RopeScaling;
use serde::{Deserialize, Serialize};

use super::check::{at_least_one, positive, require};
use crate::TrainError;

/// `[model.rope_scaling]`, under Hugging Face's names; the defaults are Llama 3.1's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RopeScalingConfig {
    /// Which formula.
    pub kind: RopeScalingKind,
    /// How many times longer the low frequencies' waves become.
    pub factor: f64,
    /// Waves longer than the original context over this are stretched in full.
    pub low_freq_factor: f64,
    /// Waves shorter than the original context over this stay as they are.
    pub high_freq_factor: f64,
    /// Tokens of context that the frequencies were made for.
    pub original_max_position_embeddings: usize,
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
}

impl Default for RopeScalingConfig {
    fn default() -> Self {
        Self {
            kind: RopeScalingKind::Llama3,
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        }
    }
}

impl RopeScalingConfig {
    pub(super) fn scaling(&self) -> RopeScaling {
        match self.kind {
            RopeScalingKind::Linear => RopeScaling::Linear { factor: self.factor },
            RopeScalingKind::Llama3 => RopeScaling::Llama3 {
                factor: self.factor,
                low_freq_factor: self.low_freq_factor,
                high_freq_factor: self.high_freq_factor,
                original_max_position: self.original_max_position_embeddings,
            },
        }
    }

    pub(super) fn of(scaling: &RopeScaling) -> Option<Self> {
        match *scaling {
            // The section has no keys for YaRN.
            RopeScaling::None | RopeScaling::Yarn(_) => None,
            RopeScaling::Linear { factor } => {
                Some(Self { kind: RopeScalingKind::Linear, factor, ..Self::default() })
            }
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
            }),
        }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, .. } = *self;
        let rule = "at least 1 and finite";
        require(factor >= 1.0 && factor.is_finite(), "model.rope_scaling.factor", factor, rule)?;
        positive("model.rope_scaling.low_freq_factor", low)?;
        let rule = format!("finite and more than low_freq_factor {low}");
        let ok = high > low && high.is_finite();
        require(ok, "model.rope_scaling.high_freq_factor", high, rule)?;
        let original = self.original_max_position_embeddings;
        at_least_one("model.rope_scaling.original_max_position_embeddings", original)
    }
}

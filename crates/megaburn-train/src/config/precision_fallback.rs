//! `[precision.fallback]`: when a layer is no longer quantised.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[precision.fallback]`: conditions under which a linear layer is computed in `train.dtype` for
/// some steps instead of being quantised. By default there are none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct PrecisionFallbackConfig {
    /// The largest share of the elements of a matrix that may saturate, of those that are not zero; a
    /// layer with a matrix of which more do falls back.
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_saturated_share: Option<f64>,
    /// The largest share of the elements of a matrix that may underflow: become zero, of those that
    /// are not zero.
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_underflow_share: Option<f64>,
    /// The factor on the mean loss of the 16 steps before above which the loss of a step is a spike,
    /// after which all layers fall back.
    #[schemars(extend("exclusiveMinimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_spike: Option<f64>,
    /// Steps between two measurements of the shares.
    #[schemars(extend("minimum" = 1))]
    pub interval: u64,
    /// The number of steps that a layer falls back for the first time. Each further time is twice as
    /// long as the last.
    #[schemars(extend("minimum" = 1))]
    pub duration_steps: u64,
}

impl Default for PrecisionFallbackConfig {
    fn default() -> Self {
        Self {
            max_saturated_share: None,
            max_underflow_share: None,
            loss_spike: None,
            interval: 10,
            duration_steps: 100,
        }
    }
}

impl PrecisionFallbackConfig {
    /// Whether shares have bounds.
    pub(crate) fn has_bounds(&self) -> bool {
        self.max_saturated_share.is_some() || self.max_underflow_share.is_some()
    }

    /// Whether a layer can fall back.
    pub(crate) fn is_set(&self) -> bool {
        self.has_bounds() || self.loss_spike.is_some()
    }
}

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::nan_if_null;

/// The precision of a step's products, with `precision.schedule` or `precision.fallback`, or in the
/// steps of `precision.log_interval`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PrecisionMetrics {
    /// The recipe of the step.
    pub recipe: String,
    /// What each quantised layer lost, by its path in the model; in the steps of
    /// `precision.log_interval`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub layers: BTreeMap<String, LayerQuantization>,
    /// The layers that are not quantised from the next step on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<FallbackMetrics>,
    /// The layers whose fall-back ends with the step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended_fallbacks: Vec<String>,
}

/// What a linear layer lost by the quantisation of its matrices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerQuantization {
    /// The layer's input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<MatrixQuantization>,
    /// Its weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<MatrixQuantization>,
    /// The gradient of its output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient: Option<MatrixQuantization>,
}

/// What a matrix lost, over all micro-batches and ranks. Shares are those of the elements that are
/// not zero before they are quantised.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MatrixQuantization {
    /// The share of elements whose magnitude times the scale is larger than the largest number of
    /// the format.
    pub saturated: f64,
    /// The share of elements that became zero.
    pub underflowed: f64,
    /// The largest magnitude.
    #[serde(deserialize_with = "nan_if_null")]
    pub amax: f64,
}

/// A layer that is not quantised for some steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FallbackMetrics {
    /// The path of the layer in the model.
    pub layer: String,
    /// The matrix that exceeded a bound: `input`, `weight` or `gradient`; `None` after a spike of the
    /// loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix: Option<String>,
    /// What exceeded its bound: `saturated`, `underflowed` or `loss`.
    pub cause: String,
    /// The share or the loss.
    pub value: f64,
    /// The bound.
    pub bound: f64,
    /// The last step in which the layer is not quantised.
    pub until_step: u64,
}

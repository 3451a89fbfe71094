//! Statistics of layers, as a line of `metrics.jsonl`.

use serde::Serialize;

/// The statistics of the layers in a step, as a line of `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerStatisticsMetrics {
    /// The step.
    pub layer_statistics: u64,
    /// The layers, in the order of their names and numbers.
    pub layers: Vec<LayerStatistics>,
}

/// The statistics of one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerStatistics {
    /// The beginning of its parameters' paths, such as `blocks.3` or `embedding`.
    pub layer: String,
    /// The residual stream after the block, over all micro-batches; absent in layers that are no
    /// blocks, and in models of a program's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activations: Option<TensorStatistics>,
    /// The gradients of its parameters, before clipping.
    pub gradients: TensorStatistics,
    /// Its parameters, after the update.
    pub weights: TensorStatistics,
}

/// The statistics of the elements of tensors. Norm, root mean square and magnitude are those of
/// finite elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TensorStatistics {
    /// The L2 norm.
    pub norm: f64,
    /// The root mean square.
    pub rms: f64,
    /// The largest magnitude.
    pub max_abs: f64,
    /// The share of zeros.
    pub zeros: f64,
    /// The share of elements that are infinite or NaN.
    pub non_finite: f64,
}

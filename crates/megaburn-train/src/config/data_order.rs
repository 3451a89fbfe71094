use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The order in which a run reads the samples of its training data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum DataOrder {
    /// The order depends on the seed and the data only, not on the length of the run. It needs no
    /// index.
    #[default]
    Megaburn,
    /// The order of Megatron-LM's `GPTDataset` and `BlendedDataset`, sample for sample. It depends
    /// on the number of epochs that the run needs. An index is built once per host in `cache_dir`.
    Megatron,
}

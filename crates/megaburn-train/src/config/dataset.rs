use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What samples are made of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum DatasetKind {
    /// Consecutive tokens, each with the next one as its label, for decoders.
    #[default]
    Gpt,
    /// Masked sentences of Megatron-LM's `BERTMaskedWordPieceDataset`, sample for sample, for
    /// encoders. The data is encoded with `megaburn data preprocess --split-sentences`.
    Bert,
}

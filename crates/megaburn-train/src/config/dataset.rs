use std::fmt;

use megaburn_models::DecoderConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::masking::DataMaskingConfig;

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
    /// Sentences with masked spans of Megatron-LM's `T5MaskedWordPieceDataset`, sample for sample, for
    /// encoder-decoder models. The data is encoded as for `bert`.
    T5,
}

impl DatasetKind {
    /// The kind that a model can learn from.
    pub(crate) fn of(model: &DecoderConfig) -> Self {
        match model.bidirectional {
            _ if model.is_encoder_decoder() => Self::T5,
            true => Self::Bert,
            false => Self::Gpt,
        }
    }

    /// Whether samples are whole sentences, of which tokens are masked.
    pub(crate) fn is_masked(self) -> bool {
        match self {
            Self::Gpt => false,
            Self::Bert | Self::T5 => true,
        }
    }

    /// The masking of Megatron-LM's script for this kind of samples.
    pub(crate) fn default_masking(self) -> DataMaskingConfig {
        let bert = DataMaskingConfig::default();
        match self {
            Self::Gpt | Self::Bert => bert,
            Self::T5 => DataMaskingConfig {
                max_ngram: 10,
                geometric: true,
                ..bert
            },
        }
    }
}

impl fmt::Display for DatasetKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpt => "gpt",
            Self::Bert => "bert",
            Self::T5 => "t5",
        })
    }
}

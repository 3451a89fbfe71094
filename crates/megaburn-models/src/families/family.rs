//! The names of the model families.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::ModelError;

/// A model family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum Family {
    /// GPT-2: Radford et al., "Language models are unsupervised multitask learners" (2019).
    Gpt2,
    /// Llama 2, 3 and 3.x.
    Llama,
    /// Mistral 7B and its successors.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Mixtral 8x7B and 8x22B.
    Mixtral,
    /// Qwen3, dense.
    Qwen3,
    /// Qwen3 mixture-of-experts models.
    #[serde(rename = "qwen3_moe")]
    Qwen3Moe,
    /// DeepSeek-V2 with its Coder and Lite variants.
    #[serde(rename = "deepseek_v2")]
    DeepseekV2,
    /// DeepSeek-V3 and R1.
    #[serde(rename = "deepseek_v3")]
    DeepseekV3,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, the text model.
    #[serde(rename = "gemma3_text")]
    Gemma3,
    /// Phi-3 and Phi-4.
    Phi3,
    /// OLMo 2.
    Olmo2,
    /// OLMoE, with experts.
    Olmoe,
    /// Granite 3, dense.
    Granite,
    /// StarCoder2.
    Starcoder2,
    /// Nemotron-3 and 4, Minitron.
    Nemotron,
    /// GPT-NeoX and Pythia.
    #[serde(rename = "gpt_neox")]
    GptNeox,
    /// Qwen1.5 and Qwen2 mixture-of-experts models.
    #[serde(rename = "qwen2_moe")]
    Qwen2Moe,
    /// Falcon 7B, 11B, 40B and 180B.
    Falcon,
    /// BERT, as `BertForPreTraining` and `BertForMaskedLM`.
    Bert,
    /// BERT with norms before attention and MLP, as Megatron-LM trains it.
    #[serde(rename = "megatron-bert")]
    MegatronBert,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 22] = [
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::Mixtral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::Gemma2,
        Self::Gemma3,
        Self::Phi3,
        Self::Olmo2,
        Self::Olmoe,
        Self::Granite,
        Self::Starcoder2,
        Self::Nemotron,
        Self::GptNeox,
        Self::Qwen2Moe,
        Self::Falcon,
        Self::Bert,
        Self::MegatronBert,
    ];
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().model_type)
    }
}

impl FromStr for Family {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let found = Self::ALL
            .into_iter()
            .find(|family| family.spec().model_type == text);
        found.ok_or_else(|| {
            let known = Self::ALL.map(|family| family.to_string()).join(", ");
            ModelError::Config(format!("unknown family `{text}`: expected one of {known}"))
        })
    }
}

//! The names of the model families.

use std::{
    borrow::Cow,
    fmt,
    hash::{Hash, Hasher},
    str::FromStr,
};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{
    ModelFamily, bert, deepseek_v2, deepseek_v3, falcon, gemma2, gemma3, gpt_neox, gpt2, granite,
    llama, megatron_bert, mistral, mixtral, nemotron, olmo2, olmoe, phi3, qwen2, qwen2_moe, qwen3,
    qwen3_moe, registry, starcoder2,
};
use crate::{decoder::DecoderConfig, error::ModelError};

/// A model family of this program: one of the built-in families, or one that was
/// [registered](Self::register). It is written as its `model_type`.
#[derive(Clone, Copy)]
pub struct Family(&'static dyn ModelFamily);

impl Family {
    /// GPT-2: Radford et al., "Language models are unsupervised multitask learners" (2019).
    pub const GPT2: Self = Self(&gpt2::SPEC);
    /// Llama 2, 3 and 3.x.
    pub const LLAMA: Self = Self(&llama::SPEC);
    /// Mistral 7B and its successors.
    pub const MISTRAL: Self = Self(&mistral::SPEC);
    /// Qwen2 and Qwen2.5.
    pub const QWEN2: Self = Self(&qwen2::SPEC);
    /// Mixtral 8x7B and 8x22B.
    pub const MIXTRAL: Self = Self(&mixtral::SPEC);
    /// Qwen3, dense.
    pub const QWEN3: Self = Self(&qwen3::SPEC);
    /// Qwen3 mixture-of-experts models.
    pub const QWEN3_MOE: Self = Self(&qwen3_moe::SPEC);
    /// DeepSeek-V2 with its Coder and Lite variants.
    pub const DEEPSEEK_V2: Self = Self(&deepseek_v2::SPEC);
    /// DeepSeek-V3 and R1.
    pub const DEEPSEEK_V3: Self = Self(&deepseek_v3::SPEC);
    /// Gemma 2.
    pub const GEMMA2: Self = Self(&gemma2::SPEC);
    /// Gemma 3, the text model.
    pub const GEMMA3: Self = Self(&gemma3::SPEC);
    /// Phi-3 and Phi-4.
    pub const PHI3: Self = Self(&phi3::SPEC);
    /// OLMo 2.
    pub const OLMO2: Self = Self(&olmo2::SPEC);
    /// OLMoE, with experts.
    pub const OLMOE: Self = Self(&olmoe::SPEC);
    /// Granite 3, dense.
    pub const GRANITE: Self = Self(&granite::SPEC);
    /// StarCoder2.
    pub const STARCODER2: Self = Self(&starcoder2::SPEC);
    /// Nemotron-3 and 4, Minitron.
    pub const NEMOTRON: Self = Self(&nemotron::SPEC);
    /// GPT-NeoX and Pythia.
    pub const GPT_NEOX: Self = Self(&gpt_neox::SPEC);
    /// Qwen1.5 and Qwen2 mixture-of-experts models.
    pub const QWEN2_MOE: Self = Self(&qwen2_moe::SPEC);
    /// Falcon 7B, 11B, 40B and 180B.
    pub const FALCON: Self = Self(&falcon::SPEC);
    /// BERT, as `BertForPreTraining` and `BertForMaskedLM`.
    pub const BERT: Self = Self(&bert::SPEC);
    /// BERT with norms before attention and MLP, as Megatron-LM trains it.
    pub const MEGATRON_BERT: Self = Self(&megatron_bert::SPEC);

    /// The families of this crate.
    pub const BUILT_IN: [Self; 22] = [
        Self::GPT2,
        Self::LLAMA,
        Self::MISTRAL,
        Self::QWEN2,
        Self::MIXTRAL,
        Self::QWEN3,
        Self::QWEN3_MOE,
        Self::DEEPSEEK_V2,
        Self::DEEPSEEK_V3,
        Self::GEMMA2,
        Self::GEMMA3,
        Self::PHI3,
        Self::OLMO2,
        Self::OLMOE,
        Self::GRANITE,
        Self::STARCODER2,
        Self::NEMOTRON,
        Self::GPT_NEOX,
        Self::QWEN2_MOE,
        Self::FALCON,
        Self::BERT,
        Self::MEGATRON_BERT,
    ];

    /// All families of this program: the built-in ones, then the registered ones.
    pub fn all() -> Vec<Self> {
        registry::all()
    }

    /// Adds a family that is defined outside of this crate. A program does this once, before it
    /// reads a configuration or a checkpoint; every process of a run does it.
    ///
    /// # Errors
    /// A family of this program has the same `model_type` or architecture, or the definition is
    /// incomplete: its template cannot be a model, a parameter has no name on Hugging Face, or its
    /// `config.json` does not read back as the same model.
    pub fn register(definition: &'static dyn ModelFamily) -> Result<Self, ModelError> {
        registry::register(Self(definition))
    }

    /// The definition of the family.
    pub fn definition(self) -> &'static dyn ModelFamily {
        self.0
    }

    /// The names in `architectures` of models of the family, the one that is written first.
    pub(super) fn architectures(self) -> Vec<&'static str> {
        let others = self.0.other_architectures().iter().copied();
        std::iter::once(self.0.architecture())
            .chain(others)
            .collect()
    }

    /// The parts of the family's block, with the sizes of a tiny model.
    pub fn template(self) -> DecoderConfig {
        DecoderConfig {
            family: self,
            ..self.0.template()
        }
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.0.model_type() == other.0.model_type()
    }
}

impl Eq for Family {}

impl Hash for Family {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.model_type().hash(state);
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Family({})", self.0.model_type())
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.model_type())
    }
}

impl Family {
    /// The family of this program with this `model_type`.
    fn named(name: &str) -> Result<Self, String> {
        let all = Self::all();
        if let Some(family) = all.iter().find(|family| family.0.model_type() == name) {
            return Ok(*family);
        }
        let known: Vec<String> = all.iter().map(|family| format!("`{family}`")).collect();
        Err(format!(
            "unknown family `{name}`, expected one of {}; a family of another crate needs the \
            program that registers it (Cli::with_family)",
            known.join(", ")
        ))
    }
}

impl FromStr for Family {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        Self::named(text).map_err(ModelError::Config)
    }
}

impl Serialize for Family {
    fn serialize<S: Serializer>(&self, into: S) -> Result<S::Ok, S::Error> {
        into.serialize_str(self.0.model_type())
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = Cow::<'de, str>::deserialize(from)?;
        Self::named(&name).map_err(serde::de::Error::custom)
    }
}

/// A choice between the families of this program.
impl JsonSchema for Family {
    fn schema_name() -> Cow<'static, str> {
        "Family".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let choice = |family: Self| {
            json_schema!({
                "type": "string",
                "const": family.0.model_type(),
                "description": family.0.description(),
            })
        };
        let choices: Vec<Schema> = Self::all().into_iter().map(choice).collect();
        json_schema!({ "oneOf": choices })
    }
}

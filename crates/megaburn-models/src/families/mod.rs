//! The definitions of the model families: the parts of a family's block, the keys of its
//! `config.json`, and the names of its tensors on Hugging Face.
//!
//! A family is one file with one [`FamilySpec`], and a line in [`Family`]; `docs/families.md`
//! explains how to add one.

mod bert;
mod deepseek_v2;
mod deepseek_v3;
mod defaults;
mod falcon;
mod family;
mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_neox;
mod granite;
mod json;
mod llama;
mod megatron_bert;
mod mistral;
mod mixtral;
mod nemotron;
mod olmo2;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod rotary;
mod starcoder2;
mod unread;

use std::path::Path;

use serde_json::Value;

use crate::{decoder::DecoderConfig, error::ModelError, hf::Key};
pub use defaults::{KeyDefault, Meaning};
pub use family::Family;
pub use json::HfJson;

/// The definition of a family. The rest of the code knows families only by this struct.
#[derive(Clone, Copy, Debug)]
pub struct FamilySpec {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The name in `architectures` of `config.json`.
    pub architecture: &'static str,
    /// The key map: the tensors of a Hugging Face checkpoint from which each parameter is read.
    pub keys: &'static [&'static [Key]],
    /// A prefix of all names that some checkpoints omit, because they were saved without the head.
    pub optional_prefix: &'static str,
    /// Suffixes of tensors that are not parameters: constants that older checkpoints contain.
    pub constants: &'static [&'static str],
    /// The prefix of the names of a layer's tensors; `*` is the number of the layer.
    pub layer: &'static str,
    /// The parts of the family's block, with the sizes of a tiny model.
    pub template: fn() -> DecoderConfig,
    /// Sets the parts that follow from a model's sizes, such as the layers with a window.
    pub follow: fn(&mut DecoderConfig),
    /// The meaning in Transformers of optional keys of `config.json` that have no value. If a key
    /// has two defaults, the first one applies.
    pub defaults: &'static [&'static [KeyDefault]],
    /// Reads `config.json`.
    pub read: fn(&HfJson<'_>) -> Result<DecoderConfig, String>,
    /// Writes the keys of `config.json`, without `architectures`, `model_type` and `dtype`.
    pub write: fn(&DecoderConfig) -> Value,
}

impl Family {
    /// The definition of the family.
    pub fn spec(self) -> &'static FamilySpec {
        match self {
            Self::Gpt2 => &gpt2::SPEC,
            Self::Llama => &llama::SPEC,
            Self::Mistral => &mistral::SPEC,
            Self::Mixtral => &mixtral::SPEC,
            Self::Qwen2 => &qwen2::SPEC,
            Self::Qwen3 => &qwen3::SPEC,
            Self::Qwen3Moe => &qwen3_moe::SPEC,
            Self::DeepseekV2 => &deepseek_v2::SPEC,
            Self::DeepseekV3 => &deepseek_v3::SPEC,
            Self::Gemma2 => &gemma2::SPEC,
            Self::Gemma3 => &gemma3::SPEC,
            Self::Phi3 => &phi3::SPEC,
            Self::Olmo2 => &olmo2::SPEC,
            Self::Olmoe => &olmoe::SPEC,
            Self::Granite => &granite::SPEC,
            Self::Starcoder2 => &starcoder2::SPEC,
            Self::Nemotron => &nemotron::SPEC,
            Self::GptNeox => &gpt_neox::SPEC,
            Self::Qwen2Moe => &qwen2_moe::SPEC,
            Self::Falcon => &falcon::SPEC,
            Self::Bert => &bert::SPEC,
            Self::MegatronBert => &megatron_bert::SPEC,
        }
    }

    /// The names in `architectures` of models of the family: with the next-sentence head of an
    /// encoder, and without it.
    fn architectures(self) -> Vec<&'static str> {
        let masked = match self {
            Self::Bert => Some(bert::MASKED_ONLY),
            Self::MegatronBert => Some(megatron_bert::MASKED_ONLY),
            _ => None,
        };
        std::iter::once(self.spec().architecture)
            .chain(masked)
            .collect()
    }

    /// The parts of the family's block, with the sizes of a tiny model.
    pub fn template(self) -> DecoderConfig {
        (self.spec().template)()
    }
}

impl DecoderConfig {
    /// Reads a Hugging Face `config.json`, in today's form (`rope_parameters`) or the earlier one
    /// (`rope_theta`, `rope_scaling`). Messages name it by `path`. Unknown keys are reported as a
    /// warning.
    ///
    /// # Errors
    /// The architecture is not supported, a required value is missing, or an unsupported value
    /// would change what the model computes.
    pub fn from_hf(json: &Value, path: &Path) -> Result<Self, ModelError> {
        let fail = |why| ModelError::File {
            path: path.to_path_buf(),
            why,
        };
        let config = read(json).map_err(fail)?;
        unread::warn(&unread::unread(json, config.family).map_err(fail)?, path);
        Ok(config)
    }

    /// The `config.json` of this model, for Transformers.
    pub fn to_hf(&self) -> Value {
        let spec = self.family.spec();
        let mut json = (spec.write)(self);
        if json["architectures"].is_null() {
            json["architectures"] = vec![spec.architecture].into();
        }
        json["model_type"] = spec.model_type.into();
        json["tie_word_embeddings"] = self.tied.into();
        json["vocab_size"] = self.vocab.into();
        if self.mtp_layers > 0 {
            json[MTP_LAYERS] = self.mtp_layers.into();
        }
        json
    }
}

impl DecoderConfig {
    /// Refuses a model that the `config.json` of its family cannot express. It could be trained,
    /// but its export could not be loaded.
    ///
    /// # Errors
    /// The first field that would be lost.
    pub fn check_sayable(&self) -> Result<(), ModelError> {
        let said = read(&self.to_hf()).map_err(ModelError::Config)?;
        // Without a window, no layer differs from the others. Fresh weights are not described.
        let comparable = |config: &Self| Self {
            full_layers: match config.window {
                Some(_) => config.full_layers.clone(),
                None => Vec::new(),
            },
            init_std: self.init_std,
            ..config.clone()
        };
        let [said, own] = [&said, self].map(|config| serde_json::json!(comparable(config)));
        let differs = |name: &&String| said.get(name.as_str()) != own.get(name.as_str());
        let fields = [&own, &said].map(|of| of.as_object().into_iter().flat_map(|of| of.keys()));
        let text = |of: &Value, name: &str| match of.get(name) {
            Some(value) => value.to_string(),
            None => "unset".into(),
        };
        match fields.into_iter().flatten().find(differs) {
            Some(name) => Err(ModelError::Config(format!(
                "`{name}` is {}, which the config.json of {} cannot express (it would mean {}): \
                choose another family",
                text(&own, name),
                self.family,
                text(&said, name)
            ))),
            None => Ok(()),
        }
    }
}

/// DeepSeek-V3's key for the number of multi-token prediction layers.
const MTP_LAYERS: &str = "num_nextn_predict_layers";

fn read(json: &Value) -> Result<DecoderConfig, String> {
    let known = || {
        Family::ALL
            .map(|family| family.architectures().join(", "))
            .join(", ")
    };
    let found = json["architectures"]
        .get(0)
        .or(json.get("architectures"))
        .and_then(Value::as_str);
    let found = found.ok_or_else(|| {
        format!(
            "`architectures` is missing; it must name one of {}",
            known()
        )
    })?;
    let family = Family::ALL
        .into_iter()
        .find(|family| family.architectures().contains(&found));
    let family = family.ok_or_else(|| {
        format!(
            "architecture `{found}` is not supported; supported are {}",
            known()
        )
    })?;
    let model_type = json["model_type"]
        .as_str()
        .unwrap_or(family.spec().model_type);
    if model_type != family.spec().model_type {
        return Err(format!(
            "`model_type` is {model_type}, but the architecture `{found}` belongs to {family}: \
            one of the two is wrong"
        ));
    }
    if !json["quantization_config"].is_null() {
        return Err(
            "`quantization_config` is set: quantized weights are not supported; use the bf16 \
            checkpoint"
                .into(),
        );
    }
    let json = HfJson::new(json, family.spec().defaults);
    let mtp_layers = json.optional_layers(MTP_LAYERS)?.unwrap_or(0);
    let config = DecoderConfig {
        mtp_layers,
        ..(family.spec().read)(&json)?
    };
    config.validate().map_err(|error| error.to_string())?;
    Ok(config)
}

#[cfg(test)]
mod tests;

//! The definitions of the model families: the parts of a family's block, the keys of its
//! `config.json`, and the names of its tensors on Hugging Face.
//!
//! A built-in family is one file with one `FamilySpec`, and a line in [`Family`]. A family of
//! another crate implements [`ModelFamily`]. `docs/families.md` explains how to add one.

mod bert;
mod built_in;
mod by_name;
mod deepseek_v2;
mod deepseek_v3;
mod defaults;
mod falcon;
mod family;
mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod json;
mod llama;
mod megatron_bert;
mod mistral;
mod mixtral;
mod model_family;
mod nemotron;
mod olmo2;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod registry;
mod rotary;
mod spec;
mod starcoder2;
mod t5;
mod unread;

use std::path::Path;

use megaburn_checkpoint::hf::check_method;
use megaburn_kernels::RopeScaling;
use serde_json::Value;

use crate::{decoder::DecoderConfig, error::ModelError};
pub use defaults::{KeyDefault, Meaning};
pub use family::Family;
pub use json::HfJson;
pub use llama::{
    COMMON as LLAMA_DEFAULTS, KEYS as LLAMA_KEYS, read_plain_sizes,
    write_sizes as write_llama_sizes,
};
pub use model_family::ModelFamily;
pub use rotary::write_percent as write_rotary_percent;
use spec::FamilySpec;

impl Family {
    /// The parts of the family's block, with the sizes of a tiny model.
    pub fn template(self) -> DecoderConfig {
        DecoderConfig {
            family: self,
            ..self.0.template()
        }
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
        let definition = self.family.definition();
        let mut json = definition.write(self);
        if json["architectures"].is_null() {
            json["architectures"] = vec![definition.architecture()].into();
        }
        json["model_type"] = definition.model_type().into();
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
            // With dynamic scaling, the file has the original length.
            max_seq_len: if config.has_dynamic_rope() {
                0
            } else {
                config.max_seq_len
            },
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

impl DecoderConfig {
    fn has_dynamic_rope(&self) -> bool {
        let scaling = self.positions.rotary().map(|rotary| &rotary.scaling);
        matches!(scaling, Some(RopeScaling::Dynamic { .. }))
    }
}

/// DeepSeek-V3's key for the number of multi-token prediction layers.
const MTP_LAYERS: &str = "num_nextn_predict_layers";

fn read(json: &Value) -> Result<DecoderConfig, String> {
    let families = Family::all();
    let known = || {
        let names = families.iter().flat_map(|of| of.architectures());
        names.collect::<Vec<_>>().join(", ")
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
    let family = families
        .iter()
        .find(|family| family.architectures().contains(&found));
    let family = *family.ok_or_else(|| {
        format!(
            "architecture `{found}` is not supported; supported are {}, and those that a program \
            registers (Cli::with_family)",
            known()
        )
    })?;
    let definition = family.definition();
    let model_type = json["model_type"]
        .as_str()
        .unwrap_or(definition.model_type());
    if model_type != definition.model_type() {
        return Err(format!(
            "`model_type` is {model_type}, but the architecture `{found}` belongs to {family}: \
            one of the two is wrong"
        ));
    }
    check_method(json)?;
    let json = HfJson::new(json, definition.defaults());
    let mtp_layers = json.optional_layers(MTP_LAYERS)?.unwrap_or(0);
    let config = DecoderConfig {
        family,
        mtp_layers,
        ..definition.read(&json)?
    };
    config.validate().map_err(|error| error.to_string())?;
    Ok(config)
}

#[cfg(test)]
mod tests;

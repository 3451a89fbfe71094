//! Mistral: a Llama whose queries see a sliding window.
//!
//! Source: Jiang et al., "Mistral 7B" (2023).

use serde_json::Value;

use super::{Family, FamilySpec, HfJson, llama};
use crate::DecoderConfig;

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig { family: Family::Mistral, ..llama::template() }
}

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let config = llama::read_sizes(json, template(), Some(8))?;
    let window = json.size_or_null("sliding_window", 4096)?;
    let full_layers = json.full_layers(config.layers)?.unwrap_or_default();
    if window.is_some() && !full_layers.is_empty() {
        return Err(
            "`layer_types` has full_attention beside a `sliding_window`, and Transformers \
                    applies that to every layer of a Mistral"
                .into(),
        );
    }
    Ok(DecoderConfig { window, ..config })
}

pub(super) fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["sliding_window"] = config.window.into();
    json
}

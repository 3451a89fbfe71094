//! Mistral: a Llama with sliding-window attention.
//!
//! Source: Jiang et al., "Mistral 7B" (2023).

use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama};
use crate::decoder::DecoderConfig;

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    description: "Mistral 7B and its successors.",
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::MISTRAL,
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    // Null means the number of query heads.
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(8)),
    KeyDefault::same("head_dim", Meaning::Nothing),
    KeyDefault::or_nothing("sliding_window", Meaning::Size(4096)),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let config = llama::read_sizes(json, template())?;
    let window = json.optional_size("sliding_window")?;
    let full_layers = json.full_layers(config.layers)?.unwrap_or_default();
    if window.is_some() && !full_layers.is_empty() {
        return Err(
            "`layer_types` has full_attention together with a `sliding_window`, but Transformers \
            applies the window to every layer of a Mistral"
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

//! Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values.
//!
//! Source: Yang et al., "Qwen2 technical report" (2024).

use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama};
use crate::decoder::DecoderConfig;

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    description: "Qwen2 and Qwen2.5.",
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

pub(super) fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::QWEN2,
        qkv_bias: true,
        norm_eps: 1e-6,
        ..llama::template()
    }
}

/// The defaults of Qwen2; Qwen3 has the same keys.
pub(super) const DEFAULTS: &[KeyDefault] = &[
    // Null means the number of query heads.
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(32)),
    KeyDefault::same("use_sliding_window", Meaning::Flag(false)),
    KeyDefault::or_nothing("sliding_window", Meaning::Size(4096)),
    KeyDefault::same("max_window_layers", Meaning::Size(28)),
    // Defaults to full attention in the layers below `max_window_layers`.
    KeyDefault::same("layer_types", Meaning::Nothing),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    with_window(json, llama::read_sizes(json, template())?)
}

/// Adds the sliding window of the later layers, which is off unless `use_sliding_window` is set.
pub(super) fn with_window(
    json: &HfJson<'_>,
    config: DecoderConfig,
) -> Result<DecoderConfig, String> {
    let window = json.optional_size("sliding_window")?;
    let used = json.flag("use_sliding_window")?;
    let Some(window) = window.filter(|_| used) else {
        return Ok(config);
    };
    let first = json.size("max_window_layers")?.min(config.layers);
    let full_layers = json
        .full_layers(config.layers)?
        .unwrap_or_else(|| (0..first).collect());
    Ok(DecoderConfig {
        window: Some(window),
        full_layers,
        ..config
    })
}

pub(super) fn write_window(config: &DecoderConfig, json: &mut Value) {
    let kind = |layer| match config.layer_window(layer) {
        Some(_) => "sliding_attention",
        None => "full_attention",
    };
    json["use_sliding_window"] = config.window.is_some().into();
    json["sliding_window"] = config.window.into();
    json["layer_types"] = json!((0..config.layers).map(kind).collect::<Vec<_>>());
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    write_window(config, &mut json);
    json
}

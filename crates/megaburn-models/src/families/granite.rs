//! Granite: a Llama with constant factors on embeddings, attention scores, residual terms and
//! logits.
//!
//! Source: IBM Granite Team, "Granite 3.0 language models" (2024).

use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama};
use crate::decoder::{DecoderConfig, Multipliers};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    description: "Granite 3, dense.",
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::GRANITE,
        norm_eps: 1e-6,
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    KeyDefault::same("mlp_bias", Meaning::Flag(false)),
    KeyDefault::same("embedding_multiplier", Meaning::Number(1.0)),
    KeyDefault::same("residual_multiplier", Meaning::Number(1.0)),
    KeyDefault::same("logits_scaling", Meaning::Number(1.0)),
    KeyDefault::same("attention_multiplier", Meaning::Number(1.0)),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let bias = json.flag("attention_bias")?;
    let config = llama::read_sizes(json, template())?;
    let scale = json.number("attention_multiplier")?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: json.flag("mlp_bias")?,
        attention_scale: (scale != plain_scale(&config)).then_some(scale),
        multipliers: Multipliers {
            embedding: json.number("embedding_multiplier")?,
            residual: json.number("residual_multiplier")?,
            logits_scaling: json.number("logits_scaling")?,
        },
        ..config
    })
}

fn plain_scale(config: &DecoderConfig) -> f64 {
    (config.head_dim as f64).powf(-0.5)
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    json["mlp_bias"] = config.mlp_bias.into();
    json["attention_multiplier"] = config
        .attention_scale
        .unwrap_or_else(|| plain_scale(config))
        .into();
    json["embedding_multiplier"] = config.multipliers.embedding.into();
    json["residual_multiplier"] = config.multipliers.residual.into();
    json["logits_scaling"] = config.multipliers.logits_scaling.into();
    json
}

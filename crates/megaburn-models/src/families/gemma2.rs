//! Gemma 2: norms before and after attention and MLP, gated GELU, soft caps on scores and logits,
//! and a sliding window in every other layer.
//!
//! Source: Gemma Team, "Gemma 2" (2024), <https://arxiv.org/abs/2408.00118>.

use megaburn_parallel::Activation;
use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen2};
use crate::{
    decoder::{DecoderConfig, NormPlacement, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    description: "Gemma 2.",
    keys: &[KEYS, llama::KEYS],
    defaults: &[DEFAULTS, COMMON, llama::COMMON],
    template,
    follow,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::GEMMA2,
        attention_soft_cap: Some(50.0),
        logits_soft_cap: Some(30.0),
        ..common_template()
    }
}

/// The parts that Gemma 2 and 3 share.
pub(super) fn common_template() -> DecoderConfig {
    let mut config = DecoderConfig {
        norm_eps: 1e-6,
        norm_placement: NormPlacement::Sandwich,
        zero_centered_gamma: true,
        activation: Activation::GeGluTanh,
        tied: true,
        ..llama::template()
    };
    scale_embeddings(&mut config);
    config
}

/// Token embeddings are multiplied by the square root of the width.
pub(super) fn scale_embeddings(config: &mut DecoderConfig) {
    config.multipliers.embedding = (config.hidden as f64).sqrt();
}

/// Every other layer has the window.
fn follow(config: &mut DecoderConfig) {
    scale_embeddings(config);
    config.full_layers = (1..config.layers).step_by(2).collect();
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("final_logit_softcapping", Meaning::Number(30.0)),
    KeyDefault::or_nothing("attn_logit_softcapping", Meaning::Number(50.0)),
    KeyDefault::same("use_bidirectional_attention", Meaning::Nothing),
];

/// The defaults that Gemma 2 and 3 share.
pub(super) const COMMON: &[KeyDefault] = &[
    KeyDefault::same("num_key_value_heads", Meaning::Size(4)),
    KeyDefault::same("head_dim", Meaning::Size(256)),
    KeyDefault::same("hidden_activation", Meaning::Text("gelu_pytorch_tanh")),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(true)),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    KeyDefault::same("query_pre_attn_scalar", Meaning::Size(256)),
    KeyDefault::or_nothing("sliding_window", Meaning::Size(4096)),
    KeyDefault::same("layer_types", Meaning::Nothing),
];

/// The names of norms; Gemma 3 has the same.
pub(super) const KEYS: &[Key] = &[
    Key::plain(
        "blocks.*.attention_output_norm.gamma",
        "model.layers.*.post_attention_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_norm.gamma",
        "model.layers.*.pre_feedforward_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_output_norm.gamma",
        "model.layers.*.post_feedforward_layernorm.weight",
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    Ok(DecoderConfig {
        positions: Positions::Rotary(json.rotary()?),
        ..read_common(json, template(), follow)?
    })
}

/// Reads the keys that Gemma 2 and 3 share. `follow` sets the layers with a window if
/// `layer_types` is absent.
pub(super) fn read_common(
    json: &HfJson<'_>,
    template: DecoderConfig,
    follow: fn(&mut DecoderConfig),
) -> Result<DecoderConfig, String> {
    json.only("hidden_activation", "gelu_pytorch_tanh")?;
    json.only("use_bidirectional_attention", false)?;
    let mut config = DecoderConfig {
        norm_eps: json.number("rms_norm_eps")?,
        ..llama::read_plain_sizes(json, template)?
    };
    follow(&mut config);
    let bias = json.flag("attention_bias")?;
    config.qkv_bias = bias;
    config.output_bias = bias;
    config.attention_soft_cap = json.optional_number("attn_logit_softcapping")?;
    config.logits_soft_cap = json.optional_number("final_logit_softcapping")?;
    let scalar = json.number("query_pre_attn_scalar")?;
    config.attention_scale = (scalar != config.head_dim as f64).then(|| scalar.powf(-0.5));
    if let Some(full) = json.full_layers(config.layers)? {
        config.full_layers = full;
    }
    let has_windows = config.full_layers.len() < config.layers;
    config.window = json
        .optional_size("sliding_window")?
        .filter(|_| has_windows);
    if config.window.is_none() {
        config.full_layers = Vec::new();
    }
    Ok(config)
}

fn write(config: &DecoderConfig) -> Value {
    write_common(config)
}

/// The inverse of [`read_common`].
pub(super) fn write_common(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    qwen2::write_window(config, &mut json);
    // Transformers takes integers only.
    let scalar = config
        .attention_scale
        .map_or(config.head_dim, |scale| scale.powi(-2).round() as usize);
    json["hidden_activation"] = "gelu_pytorch_tanh".into();
    json["query_pre_attn_scalar"] = scalar.into();
    json["attn_logit_softcapping"] = config.attention_soft_cap.into();
    json["final_logit_softcapping"] = config.logits_soft_cap.into();
    json["attention_bias"] = config.qkv_bias.into();
    if let Some(keys) = json.as_object_mut() {
        keys.remove("hidden_act");
        keys.remove("use_sliding_window");
    }
    json
}

//! StarCoder2: LayerNorm, biases everywhere, the tanh approximation of GELU, rotary positions and
//! grouped queries.
//!
//! Source: Lozhkov et al., "StarCoder 2 and The Stack v2" (2024),
//! <https://arxiv.org/abs/2402.19173>.

use megaburn_parallel::{Activation, NormKind};
use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama};
use crate::{
    decoder::{DecoderConfig, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "starcoder2",
    architecture: "Starcoder2ForCausalLM",
    description: "StarCoder2.",
    keys: &[KEYS, NORM_BIASES, llama::KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::STARCODER2,
        norm: NormKind::Layer,
        activation: Activation::GeluTanh,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        tied: true,
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(2)),
    KeyDefault::same("hidden_act", Meaning::Text("gelu_pytorch_tanh")),
    KeyDefault::same("norm_epsilon", Meaning::Number(1e-5)),
    KeyDefault::same("use_bias", Meaning::Flag(true)),
    KeyDefault::same("sliding_window", Meaning::Nothing),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(true)),
];

/// The shifts of norms; Nemotron has the same names.
pub(super) const NORM_BIASES: &[Key] = &[
    Key::plain("norm.beta", "model.norm.bias"),
    Key::plain(
        "blocks.*.attention_norm.beta",
        "model.layers.*.input_layernorm.bias",
    ),
    Key::plain(
        "blocks.*.mlp_norm.beta",
        "model.layers.*.post_attention_layernorm.bias",
    ),
];

const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["model.layers.*.mlp.c_fc.weight"],
    ),
    Key::plain("blocks.*.mlp.up.bias", "model.layers.*.mlp.c_fc.bias"),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["model.layers.*.mlp.c_proj.weight"],
    ),
    Key::plain("blocks.*.mlp.down.bias", "model.layers.*.mlp.c_proj.bias"),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    json.only("hidden_act", "gelu_pytorch_tanh")?;
    let bias = json.flag("use_bias")?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: bias,
        window: json.optional_size("sliding_window")?,
        norm_eps: json.number("norm_epsilon")?,
        positions: Positions::Rotary(json.rotary()?),
        ..llama::read_plain_sizes(json, template())?
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["hidden_act"] = "gelu_pytorch_tanh".into();
    json["use_bias"] = config.mlp_bias.into();
    json["sliding_window"] = config.window.into();
    llama::rename(&mut json, "rms_norm_eps", "norm_epsilon");
    json
}

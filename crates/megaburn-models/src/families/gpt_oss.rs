//! gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a sliding window in every
//! other layer. The experts of a layer are stacked in one tensor, with gate and up columns in turn.
//!
//! Source: OpenAI, "gpt-oss-120b & gpt-oss-20b model card" (2025),
//! <https://arxiv.org/abs/2508.10925>; Transformers `models/gpt_oss/modeling_gpt_oss.py`.

use megaburn_kernels::{RopeScaling, YarnScaling};
use megaburn_parallel::Activation;
use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen2};
use crate::{
    decoder::{DecoderConfig, Experts, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    description: "gpt-oss 20B and 120B, with experts.",
    keys: &[KEYS, llama::KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    follow,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    let parts = llama::template();
    let experts = Experts {
        router_bias: true,
        ..Experts::new(8, 2, parts.ffn)
    };
    DecoderConfig {
        family: Family::GPT_OSS,
        activation: Activation::ClampedSwiGlu,
        attention_sinks: true,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        experts: Some(experts),
        ..parts
    }
}

/// Every other layer, from the first one on, has the window.
fn follow(config: &mut DecoderConfig) {
    config.full_layers = (1..config.layers).step_by(2).collect();
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(8)),
    KeyDefault::same("head_dim", Meaning::Size(64)),
    KeyDefault::same("rms_norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("rope_theta", Meaning::Number(150_000.0)),
    KeyDefault::same("attention_bias", Meaning::Flag(true)),
    KeyDefault::or_nothing("sliding_window", Meaning::Size(128)),
    KeyDefault::same("num_local_experts", Meaning::Size(128)),
    KeyDefault::same("num_experts_per_tok", Meaning::Size(4)),
    KeyDefault::same("swiglu_alpha", Meaning::Number(1.702)),
    KeyDefault::same("swiglu_limit", Meaning::Number(7.0)),
    // Defaults to a window in every other layer.
    KeyDefault::same("layer_types", Meaning::Nothing),
];

const KEYS: &[Key] = &[
    Key::plain(
        "blocks.*.attention.core.sinks",
        "model.layers.*.self_attn.sinks",
    ),
    Key::linear(
        "blocks.*.moe.router.weight",
        &["model.layers.*.mlp.router.weight"],
    ),
    Key::plain(
        "blocks.*.moe.router.logit_bias",
        "model.layers.*.mlp.router.bias",
    ),
    Key::interleaved(
        "blocks.*.moe.experts.*.up.weight",
        "model.layers.*.mlp.experts.gate_up_proj[*]",
    ),
    Key::interleaved(
        "blocks.*.moe.experts.*.up.bias",
        "model.layers.*.mlp.experts.gate_up_proj_bias[*]",
    ),
    Key::plain(
        "blocks.*.moe.experts.*.down.weight",
        "model.layers.*.mlp.experts.down_proj[*]",
    ),
    Key::plain(
        "blocks.*.moe.experts.*.down.bias",
        "model.layers.*.mlp.experts.down_proj_bias[*]",
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    json.only("swiglu_alpha", 1.702)?;
    json.only("swiglu_limit", 7.0)?;
    let mut config = llama::read_sizes(json, template())?;
    if ["rope_scaling", "rope_parameters"]
        .iter()
        .all(|key| json.get(key).is_none())
        && let Positions::Rotary(rotary) = &mut config.positions
    {
        // The default of Transformers' class.
        let yarn = YarnScaling::new(32.0, 4096).with_truncate(false);
        rotary.scaling = RopeScaling::Yarn(yarn);
    }
    follow(&mut config);
    if let Some(full) = json.full_layers(config.layers)? {
        config.full_layers = full;
    }
    let has_windows = config.full_layers.len() < config.layers;
    let window = json.optional_size("sliding_window")?;
    config.window = window.filter(|_| has_windows);
    if config.window.is_none() {
        config.full_layers = Vec::new();
    }
    let bias = json.flag("attention_bias")?;
    let num = json.size("num_local_experts")?;
    let top_k = json.size("num_experts_per_tok")?;
    agrees(json, "experts_per_token", top_k, "`num_experts_per_tok`")?;
    if let Positions::Rotary(rotary) = &config.positions
        && let RopeScaling::Yarn(yarn) = &rotary.scaling
    {
        let name = "the original length of `rope_scaling`";
        agrees(
            json,
            "initial_context_length",
            yarn.original_max_position,
            name,
        )?;
    }
    let experts = Experts {
        router_bias: true,
        ..Experts::new(num, top_k, config.ffn)
    };
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        experts: Some(experts),
        ..config
    })
}

/// Refuses a number that a published file repeats under a second name with another value.
fn agrees(json: &HfJson<'_>, key: &str, expected: usize, name: &str) -> Result<(), String> {
    match json.optional_size(key)? {
        Some(found) if found != expected => {
            Err(format!("`{key}` is {found}, but {name} is {expected}"))
        }
        _ => Ok(()),
    }
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    qwen2::write_window(config, &mut json);
    json["attention_bias"] = config.qkv_bias.into();
    json["swiglu_alpha"] = json!(1.702);
    json["swiglu_limit"] = json!(7.0);
    if let Some(experts) = &config.experts {
        json["intermediate_size"] = experts.ffn.into();
        json["num_local_experts"] = experts.num.into();
        json["num_experts_per_tok"] = experts.top_k.into();
    }
    if let Some(keys) = json.as_object_mut() {
        keys.remove("use_sliding_window");
    }
    json
}

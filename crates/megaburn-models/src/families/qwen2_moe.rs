//! Qwen2 and Qwen1.5 mixture-of-experts models: a Qwen2 with experts in all layers or some, and a
//! shared expert whose output a gate scales.
//!
//! Source: Yang et al., "Qwen2 technical report" (2024), <https://arxiv.org/abs/2407.10671>.

use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen2, qwen3_moe};
use crate::{
    decoder::{DecoderConfig, Experts},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    description: "Qwen1.5 and Qwen2 mixture-of-experts models.",
    keys: &[KEYS, qwen3_moe::KEYS, llama::KEYS],
    defaults: &[DEFAULTS, qwen2::DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    let parts = qwen2::template();
    let experts = Experts {
        normalise: false,
        shared_ffn: Some(parts.ffn),
        shared_gate: true,
        ..Experts::new(8, 2, parts.ffn / 2)
    };
    DecoderConfig {
        family: Family::QWEN2_MOE,
        experts: Some(experts),
        ..parts
    }
}

const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.moe.shared.up.weight",
        &[
            "model.layers.*.mlp.shared_expert.gate_proj.weight",
            "model.layers.*.mlp.shared_expert.up_proj.weight",
        ],
    ),
    Key::linear(
        "blocks.*.moe.shared.down.weight",
        &["model.layers.*.mlp.shared_expert.down_proj.weight"],
    ),
    Key::linear(
        "blocks.*.moe.shared_gate.weight",
        &["model.layers.*.mlp.shared_expert_gate.weight"],
    ),
];

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(16)),
    KeyDefault::same("qkv_bias", Meaning::Flag(true)),
    KeyDefault::same("num_experts", Meaning::Size(60)),
    KeyDefault::same("num_experts_per_tok", Meaning::Size(4)),
    KeyDefault::same("moe_intermediate_size", Meaning::Size(1408)),
    KeyDefault::same("shared_expert_intermediate_size", Meaning::Size(5632)),
    KeyDefault::same("norm_topk_prob", Meaning::Flag(false)),
    KeyDefault::same("decoder_sparse_step", Meaning::Size(1)),
    // Defaults to experts in all layers.
    KeyDefault::same("mlp_only_layers", Meaning::Nothing),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let sizes = llama::read_sizes(json, template())?;
    let num = json.size("num_experts")?;
    let experts = Experts {
        shared_ffn: Some(json.size("shared_expert_intermediate_size")?),
        shared_gate: true,
        normalise: json.flag("norm_topk_prob")?,
        dense_layers: qwen3_moe::dense_layers(json, sizes.layers, num)?,
        ..Experts::new(
            num,
            json.size("num_experts_per_tok")?,
            json.size("moe_intermediate_size")?,
        )
    };
    let config = DecoderConfig {
        qkv_bias: json.flag("qkv_bias")?,
        experts: Some(experts),
        ..sizes
    };
    with_window(json, config)
}

/// Adds the sliding window, which is off unless `use_sliding_window` is set. Without `layer_types`
/// it covers every other layer of the first `max_window_layers`, as in Transformers.
fn with_window(json: &HfJson<'_>, config: DecoderConfig) -> Result<DecoderConfig, String> {
    let window = json.optional_size("sliding_window")?;
    let used = json.flag("use_sliding_window")?;
    let Some(window) = window.filter(|_| used) else {
        return Ok(config);
    };
    let end = json.size("max_window_layers")?;
    let is_full = |layer: &usize| layer % 2 == 1 || *layer >= end;
    let full_layers = json
        .full_layers(config.layers)?
        .unwrap_or_else(|| (0..config.layers).filter(is_full).collect());
    Ok(DecoderConfig {
        window: Some(window),
        full_layers,
        ..config
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["qkv_bias"] = config.qkv_bias.into();
    qwen2::write_window(config, &mut json);
    if let Some(experts) = &config.experts {
        json["num_experts"] = experts.num.into();
        json["num_experts_per_tok"] = experts.top_k.into();
        json["moe_intermediate_size"] = experts.ffn.into();
        json["shared_expert_intermediate_size"] = experts.shared_ffn.into();
        json["norm_topk_prob"] = experts.normalise.into();
        json["decoder_sparse_step"] = 1.into();
        json["mlp_only_layers"] = json!(experts.dense_layers);
    }
    json
}

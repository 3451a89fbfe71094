//! Qwen3 mixture-of-experts models: a Qwen3 with experts in place of its MLPs, in all layers or
//! some.
//!
//! Source: Yang et al., "Qwen3 technical report" (2025), <https://arxiv.org/abs/2505.09388>.

use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen3};
use crate::{
    decoder::{DecoderConfig, Experts},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    description: "Qwen3 mixture-of-experts models.",
    keys: &[llama::KEYS, qwen3::KEYS, KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    let parts = qwen3::template();
    // The published models normalise their softmax weights, which is the default of `Experts::new`.
    let experts = Some(Experts::new(8, 2, parts.ffn / 2));
    DecoderConfig {
        family: Family::QWEN3_MOE,
        experts,
        ..parts
    }
}

/// The names of routers and experts; DeepSeek has the same.
pub(super) const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.moe.router.weight",
        &["model.layers.*.mlp.gate.weight"],
    ),
    Key::linear(
        "blocks.*.moe.experts.*.up.weight",
        &[
            "model.layers.*.mlp.experts.*.gate_proj.weight",
            "model.layers.*.mlp.experts.*.up_proj.weight",
        ],
    ),
    Key::linear(
        "blocks.*.moe.experts.*.down.weight",
        &["model.layers.*.mlp.experts.*.down_proj.weight"],
    ),
];

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(4)),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    KeyDefault::same("use_sliding_window", Meaning::Flag(false)),
    KeyDefault::or_nothing("sliding_window", Meaning::Size(4096)),
    KeyDefault::or_nothing("num_local_experts", Meaning::Size(128)),
    KeyDefault::same("num_experts_per_tok", Meaning::Size(8)),
    KeyDefault::same("moe_intermediate_size", Meaning::Size(768)),
    KeyDefault::same("norm_topk_prob", Meaning::Flag(false)),
    KeyDefault::same("decoder_sparse_step", Meaning::Size(1)),
    // Defaults to experts in all layers.
    KeyDefault::same("mlp_only_layers", Meaning::Nothing),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let bias = json.flag("attention_bias")?;
    let sizes = llama::read_sizes(json, template())?;
    let used = json.flag("use_sliding_window")?;
    let window = json.optional_size("sliding_window")?.filter(|_| used);
    // Transformers 5 writes another key than the published files.
    let num = match json.optional_size("num_experts")? {
        Some(num) => num,
        None => json.size("num_local_experts")?,
    };
    let experts = Experts {
        normalise: json.flag("norm_topk_prob")?,
        dense_layers: dense_layers(json, sizes.layers, num)?,
        ..Experts::new(
            num,
            json.size("num_experts_per_tok")?,
            json.size("moe_intermediate_size")?,
        )
    };
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        window,
        experts: Some(experts),
        ..sizes
    })
}

/// The layers that have an MLP, by `mlp_only_layers` and `decoder_sparse_step`. Qwen2-MoE has the
/// same keys.
pub(super) fn dense_layers(
    json: &HfJson<'_>,
    layers: usize,
    num_experts: usize,
) -> Result<Vec<usize>, String> {
    let step = json.size("decoder_sparse_step")?;
    let mut dense_layers = json.sizes("mlp_only_layers")?;
    if step == 0 || num_experts == 0 {
        return Err(format!(
            "`decoder_sparse_step` {step} and `num_experts` {num_experts} yield no experts"
        ));
    }
    dense_layers.extend((0..layers).filter(|layer| (layer + 1) % step != 0));
    dense_layers.sort_unstable();
    dense_layers.dedup();
    Ok(dense_layers)
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    json["use_sliding_window"] = config.window.is_some().into();
    json["sliding_window"] = config.window.into();
    if let Some(experts) = &config.experts {
        json["num_experts"] = experts.num.into();
        json["num_experts_per_tok"] = experts.top_k.into();
        json["moe_intermediate_size"] = experts.ffn.into();
        json["norm_topk_prob"] = experts.normalise.into();
        json["decoder_sparse_step"] = 1.into();
        json["mlp_only_layers"] = json!(experts.dense_layers);
    }
    json
}

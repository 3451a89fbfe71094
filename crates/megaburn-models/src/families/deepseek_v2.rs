//! DeepSeek-V2 with its Coder and Lite variants: latent attention, and experts with a shared expert
//! after some dense layers.
//!
//! Source: DeepSeek-AI, "DeepSeek-V2" (2024), <https://arxiv.org/abs/2405.04434>.

use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen3_moe};
use crate::{
    decoder::{DecoderConfig, Experts, Mla},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    description: "DeepSeek-V2 with its Coder and Lite variants.",
    keys: &[llama::KEYS, qwen3_moe::KEYS, KEYS],
    defaults: &[DEFAULTS, LATENT, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

pub(super) fn template() -> DecoderConfig {
    let parts = llama::template();
    let ffn = parts.ffn / 2;
    let latent = Mla {
        q_lora_rank: None,
        kv_lora_rank: 32,
        qk_nope_head_dim: 32,
        qk_rope_head_dim: 16,
        v_head_dim: 32,
        interleaved: true,
    };
    let experts = Experts {
        shared_ffn: Some(ffn),
        normalise: false,
        dense_layers: vec![0],
        ..Experts::new(8, 2, ffn)
    };
    DecoderConfig {
        family: Family::DEEPSEEK_V2,
        kv_heads: parts.heads,
        head_dim: latent.qk_head_dim(),
        norm_eps: 1e-6,
        experts: Some(experts),
        latent: Some(latent),
        ..parts
    }
}

/// The names of tensors; DeepSeek-V3 has the same.
pub(super) const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.attention.q.weight",
        &["model.layers.*.self_attn.q_proj.weight"],
    ),
    Key::linear(
        "blocks.*.attention.q_down.weight",
        &["model.layers.*.self_attn.q_a_proj.weight"],
    ),
    Key::plain(
        "blocks.*.attention.q_norm.gamma",
        "model.layers.*.self_attn.q_a_layernorm.weight",
    ),
    Key::linear(
        "blocks.*.attention.q_up.weight",
        &["model.layers.*.self_attn.q_b_proj.weight"],
    ),
    Key::linear(
        "blocks.*.attention.kv_down.weight",
        &["model.layers.*.self_attn.kv_a_proj_with_mqa.weight"],
    ),
    Key::plain(
        "blocks.*.attention.kv_norm.gamma",
        "model.layers.*.self_attn.kv_a_layernorm.weight",
    ),
    Key::linear(
        "blocks.*.attention.kv_up.weight",
        &["model.layers.*.self_attn.kv_b_proj.weight"],
    ),
    Key::linear(
        "blocks.*.moe.shared.up.weight",
        &[
            "model.layers.*.mlp.shared_experts.gate_proj.weight",
            "model.layers.*.mlp.shared_experts.up_proj.weight",
        ],
    ),
    Key::linear(
        "blocks.*.moe.shared.down.weight",
        &["model.layers.*.mlp.shared_experts.down_proj.weight"],
    ),
];

const DEFAULTS: &[KeyDefault] = &[
    // Defaults to the number of query heads.
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    KeyDefault::same("mlp_bias", Meaning::Flag(false)),
    KeyDefault::or_false("norm_topk_prob", false),
    KeyDefault::or_nothing("topk_method", Meaning::Text("greedy")),
    KeyDefault::same("n_group", Meaning::Nothing),
    KeyDefault::same("topk_group", Meaning::Nothing),
    KeyDefault::same("num_experts_per_tok", Meaning::Nothing),
    KeyDefault::same("moe_intermediate_size", Meaning::Size(1407)),
    KeyDefault::same("n_shared_experts", Meaning::Size(2)),
    KeyDefault::same("n_routed_experts", Meaning::Size(64)),
    KeyDefault::same("routed_scaling_factor", Meaning::Number(1.0)),
    KeyDefault::same("first_k_dense_replace", Meaning::Size(0)),
    KeyDefault::same("v_head_dim", Meaning::Size(128)),
];

/// The defaults of latent attention; DeepSeek-V3 has the same keys.
pub(super) const LATENT: &[KeyDefault] = &[
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    // Null means that queries are projected from the residual stream.
    KeyDefault::or_nothing("q_lora_rank", Meaning::Size(1536)),
    KeyDefault::same("kv_lora_rank", Meaning::Size(512)),
    KeyDefault::same("qk_nope_head_dim", Meaning::Size(128)),
    KeyDefault::same("qk_rope_head_dim", Meaning::Size(64)),
];

/// Reads the keys of `config.json` that both families share into a family's `template`, except for
/// the routing of experts.
pub(super) fn read_sizes(
    json: &HfJson<'_>,
    template: DecoderConfig,
) -> Result<DecoderConfig, String> {
    json.only("attention_bias", false)?;
    // DeepSeek's own code reads this key, Transformers does not.
    json.only("moe_layer_freq", 1)?;
    let sizes = llama::read_sizes(json, template)?;
    let latent = Mla {
        q_lora_rank: json.optional_size("q_lora_rank")?,
        kv_lora_rank: json.size("kv_lora_rank")?,
        qk_nope_head_dim: json.size("qk_nope_head_dim")?,
        qk_rope_head_dim: json.size("qk_rope_head_dim")?,
        v_head_dim: json.size("v_head_dim")?,
        interleaved: true,
    };
    Ok(DecoderConfig {
        head_dim: latent.qk_head_dim(),
        latent: Some(latent),
        ..sizes
    })
}

/// Reads the experts of both families; `how` is their routing. The first `first_k_dense_replace`
/// layers have no experts.
pub(super) fn read_experts(
    json: &HfJson<'_>,
    layers: usize,
    how: Experts,
) -> Result<Experts, String> {
    let ffn = json.size("moe_intermediate_size")?;
    let shared = json.size("n_shared_experts")?;
    if shared == 0 {
        return Err(
            "`n_shared_experts` is 0, but Transformers' model always has a shared expert".into(),
        );
    }
    Ok(Experts {
        num: json.size("n_routed_experts")?,
        top_k: json.size("num_experts_per_tok")?,
        ffn,
        shared_ffn: Some(shared.saturating_mul(ffn)),
        scale: json.number("routed_scaling_factor")?,
        dense_layers: (0..json.size("first_k_dense_replace")?.min(layers)).collect(),
        ..how
    })
}

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    json.only("mlp_bias", false)?;
    json.only("scoring_func", "softmax")?;
    // Transformers does not read this key.
    json.only("norm_topk_prob", false)?;
    let config = read_sizes(json, template())?;
    let DecoderConfig {
        hidden,
        heads,
        layers,
        ..
    } = config;
    if heads > 0 && !hidden.is_multiple_of(heads) {
        return Err(format!(
            "`hidden_size` {hidden} is not a multiple of `num_attention_heads` {heads}, which Transformers refuses"
        ));
    }
    let groups = match json.text("topk_method")?.as_str() {
        "greedy" => None,
        // The score of a group is that of its best expert.
        "group_limited_greedy" => Some([json.size("n_group")?, json.size("topk_group")?, 1]),
        other => {
            return Err(format!(
                "`topk_method` is {other}; `greedy` and `group_limited_greedy` are supported"
            ));
        }
    };
    let how = Experts {
        normalise: false,
        groups,
        ..Experts::new(1, 1, 1)
    };
    let experts = Some(read_experts(json, layers, how)?);
    Ok(DecoderConfig { experts, ..config })
}

/// The inverse of [`read_sizes`] and [`read_experts`].
pub(super) fn write_sizes(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = false.into();
    if let Some(latent) = &config.latent {
        json["q_lora_rank"] = latent.q_lora_rank.into();
        json["kv_lora_rank"] = latent.kv_lora_rank.into();
        json["qk_nope_head_dim"] = latent.qk_nope_head_dim.into();
        json["qk_rope_head_dim"] = latent.qk_rope_head_dim.into();
        json["qk_head_dim"] = latent.qk_head_dim().into();
        json["v_head_dim"] = latent.v_head_dim.into();
        // In Transformers, `head_dim` is the number of rotated features.
        json["head_dim"] = latent.qk_rope_head_dim.into();
    }
    if let Some(experts) = &config.experts {
        json["n_routed_experts"] = experts.num.into();
        json["num_experts_per_tok"] = experts.top_k.into();
        json["moe_intermediate_size"] = experts.ffn.into();
        json["n_shared_experts"] = (experts.shared_ffn.unwrap_or(0) / experts.ffn).into();
        json["routed_scaling_factor"] = experts.scale.into();
        json["norm_topk_prob"] = experts.normalise.into();
        json["first_k_dense_replace"] = experts.dense_layers.len().into();
    }
    json
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = write_sizes(config);
    json["mlp_bias"] = false.into();
    json["topk_method"] = json!("greedy");
    if let Some([groups, kept, _]) = config.experts.as_ref().and_then(|experts| experts.groups) {
        json["topk_method"] = json!("group_limited_greedy");
        json["n_group"] = groups.into();
        json["topk_group"] = kept.into();
    }
    json
}

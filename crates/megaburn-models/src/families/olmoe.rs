//! OLMoE: experts in all layers, and one norm over all query heads and one over all key heads.
//!
//! Source: Muennighoff et al., "OLMoE" (2024), <https://arxiv.org/abs/2409.02060>.

use megaburn_parallel::QkNormKind;
use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen3, qwen3_moe};
use crate::decoder::{DecoderConfig, Experts};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    description: "OLMoE, with experts.",
    keys: &[qwen3_moe::KEYS, qwen3::KEYS, llama::KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    let parts = llama::template();
    let experts = Experts {
        normalise: false,
        ..Experts::new(8, 2, parts.ffn)
    };
    DecoderConfig {
        family: Family::OLMOE,
        qk_norm: Some(QkNormKind::Width),
        experts: Some(experts),
        ..parts
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    KeyDefault::same("rms_norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    KeyDefault::same("clip_qkv", Meaning::Nothing),
    KeyDefault::same("num_experts", Meaning::Size(64)),
    KeyDefault::same("num_experts_per_tok", Meaning::Size(8)),
    KeyDefault::same("norm_topk_prob", Meaning::Flag(false)),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    if let Some(limit) = json.get("clip_qkv") {
        return Err(format!("`clip_qkv` is {limit}, but only null is supported"));
    }
    let bias = json.flag("attention_bias")?;
    let config = llama::read_sizes(json, template())?;
    let num = json.size("num_experts")?;
    let top_k = json.size("num_experts_per_tok")?;
    let experts = Experts {
        normalise: json.flag("norm_topk_prob")?,
        ..Experts::new(num, top_k, config.ffn)
    };
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        experts: Some(experts),
        ..config
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    if let Some(experts) = &config.experts {
        json["intermediate_size"] = experts.ffn.into();
        json["num_experts"] = experts.num.into();
        json["num_experts_per_tok"] = experts.top_k.into();
        json["norm_topk_prob"] = experts.normalise.into();
    }
    json
}
